package hearth.client;

import java.time.Duration;
import java.util.Optional;

/**
 * Any failure: a code, one sentence, and the field at fault. {@link RequestRefused}, {@link
 * ServiceFailed} and {@link ConnectionFailed} are its families.
 */
public class HearthException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    /** The request must change before it can work. */
    public static final class RequestRefused extends HearthException {
        private static final long serialVersionUID = 1L;

        private RequestRefused(Details details, Throwable cause) {
            super(details, cause);
        }
    }

    /** The request was fine, and the service could not take or finish it: try again later. */
    public static final class ServiceFailed extends HearthException {
        private static final long serialVersionUID = 1L;

        private ServiceFailed(Details details, Throwable cause) {
            super(details, cause);
        }
    }

    /** The daemon cannot be reached, or the conversation with it broke. */
    public static final class ConnectionFailed extends HearthException {
        private static final long serialVersionUID = 1L;

        private ConnectionFailed(Details details, Throwable cause) {
            super(details, cause);
        }
    }

    private record Details(
            String code, String message, String field, Double retryAfterS, Answers.Usage usage) {}

    private final transient Details details;
    /** The code. */
    private final ErrorCode code;

    private HearthException(Details details, Throwable cause) {
        super(details.message, cause);
        this.details = details;
        this.code = ErrorCode.of(details.code);
    }

    static HearthException of(ErrorCode code, String message, String field) {
        return of(new Details(code.text(), message, field, null, null), null);
    }

    static HearthException of(ErrorCode code, String message, Throwable cause) {
        return of(new Details(code.text(), message, "", null, null), cause);
    }

    static HearthException of(ErrorCode code, String message) {
        return of(code, message, "");
    }

    static HearthException of(Answers.Failure answer) {
        return of(
                new Details(
                        answer.code(),
                        answer.message(),
                        answer.field(),
                        answer.retryAfterS(),
                        answer.usage()),
                null);
    }

    private static HearthException of(Details details, Throwable cause) {
        return switch (ErrorCode.of(details.code).kind()) {
            case REQUEST -> new RequestRefused(details, cause);
            case SERVICE -> new ServiceFailed(details, cause);
            case CONNECTION -> new ConnectionFailed(details, cause);
            case CLIENT -> new HearthException(details, cause);
        };
    }

    /** The same failure with the stack of the thread that calls, for it arose in another one. */
    HearthException here() {
        return of(details, this);
    }

    /** {@return the code; {@link ErrorCode#INTERNAL} for one that is unknown here} */
    public ErrorCode code() {
        return code;
    }

    /** {@return the code as the daemon wrote it} */
    public String codeText() {
        return code == ErrorCode.INTERNAL && details != null ? details.code : code.text();
    }

    /** {@return the field at fault, as {@code messages[0].role}; empty where it is none} */
    public String field() {
        return details == null ? "" : details.field;
    }

    /** {@return how long to wait before trying again, where waiting helps} */
    public Optional<Duration> retryAfter() {
        return details == null || details.retryAfterS == null
                ? Optional.empty()
                : Optional.of(Duration.ofNanos((long) (details.retryAfterS * 1e9)));
    }

    /** {@return what a generation had taken when it failed, where the daemon told} */
    public Optional<Answers.Usage> usage() {
        return details == null ? Optional.empty() : Optional.ofNullable(details.usage);
    }
}
