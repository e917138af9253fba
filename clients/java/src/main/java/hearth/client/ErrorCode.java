package hearth.client;

import java.util.Locale;
import java.util.Map;
import java.util.stream.Collectors;
import java.util.stream.Stream;

/** Stable codes of failures: those of the daemon, and those that arise in the client. */
public enum ErrorCode {
    /** A field is missing, has a wrong type or is out of range. */
    INVALID_VALUE(Kind.REQUEST),
    /** The daemon does not offer this option. */
    UNSUPPORTED_OPTION(Kind.REQUEST),
    /** A schema, regular expression or grammar cannot be enforced. */
    GRAMMAR_INVALID(Kind.REQUEST),
    /** The prompt has no text to continue. */
    PROMPT_EMPTY(Kind.REQUEST),
    /** The prompt has more tokens than the limit. */
    PROMPT_TOO_LONG(Kind.REQUEST),
    /** Prompt and {@code max_tokens} together exceed the limit. */
    CAPACITY_EXCEEDED(Kind.REQUEST),
    /** No adapter has that name, or it was removed. */
    ADAPTER_UNKNOWN(Kind.REQUEST),
    /** Pins would take too much of the prefix cache. */
    CACHE_FULL(Kind.REQUEST),
    /** A picture cannot be read, or is not what its part says. */
    IMAGE_INVALID(Kind.REQUEST),
    /** A picture has too many bytes or pixels. */
    IMAGE_TOO_LARGE(Kind.REQUEST),
    /** A picture took too long to decode. */
    IMAGE_TIMEOUT(Kind.REQUEST),
    /** The bytes were no message of the protocol. */
    BAD_MESSAGE(Kind.REQUEST),
    /** The message, or its answer, has too many bytes. */
    MESSAGE_TOO_LARGE(Kind.REQUEST),
    /** The daemon has no message of this type. */
    UNKNOWN_MESSAGE(Kind.REQUEST),
    /** The id is that of an open request. */
    DUPLICATE_ID(Kind.REQUEST),
    /** A process of the daemon died each time that it had this request. */
    REPEATED_FAILURE(Kind.REQUEST),
    /** The reply is no turn of a conversation: it has no text and no whole call. */
    REPLY_EMPTY(Kind.REQUEST),

    /** The daemon serves as many clients as it may. */
    TOO_MANY_CLIENTS(Kind.SERVICE),
    /** The client has as many requests open, or as much to send, as it may. */
    TOO_MANY_REQUESTS(Kind.SERVICE),
    /** Too much work waits already. */
    QUEUE_FULL(Kind.SERVICE),
    /** The time of the request ran out. */
    DEADLINE_EXCEEDED(Kind.SERVICE),
    /** The program did not read its answers in time. */
    SLOW_CLIENT(Kind.SERVICE),
    /** Nothing was heard of the client for its lease. */
    LEASE_EXPIRED(Kind.SERVICE),
    /** The daemon stops. */
    SHUTTING_DOWN(Kind.SERVICE),
    /** The engine's process died; it is started again. */
    EXECUTOR_FAILED(Kind.SERVICE),
    /** The process that looks at pictures died; it is started again. */
    ENCODER_FAILED(Kind.SERVICE),
    /** A file of the model was cut short or changed. */
    WEIGHTS_INVALID(Kind.SERVICE),
    /** The daemon's owner has ended the request. */
    CANCELLED_BY_OPERATOR(Kind.SERVICE),
    /** The engine computed a value that is not a number. */
    NON_FINITE(Kind.SERVICE),
    /** The device has no memory for the request. */
    OUT_OF_MEMORY(Kind.SERVICE),
    /** A fault of the daemon, or a code that this client does not know. */
    INTERNAL(Kind.SERVICE),

    /** Client and daemon have no protocol number in common. */
    UNSUPPORTED_PROTOCOL(Kind.CONNECTION),
    /** The socket is for others. */
    NOT_ALLOWED(Kind.CONNECTION),
    /** The address names no socket that this client could open. */
    CONNECTION_FAILED(Kind.CONNECTION),
    /** Nobody listens at the socket, or there is none. */
    CONNECTION_REFUSED(Kind.CONNECTION),
    /** No answer came in time. */
    CONNECTION_TIMEOUT(Kind.CONNECTION),
    /** The connection or its session ended, and all that was open with it. */
    CONNECTION_LOST(Kind.CONNECTION),
    /** An answer came that the protocol does not allow. */
    PROTOCOL_VIOLATION(Kind.CONNECTION),
    /** The program closed the client. */
    CLIENT_CLOSED(Kind.CONNECTION),

    /** The thread that waited was interrupted. */
    INTERRUPTED(Kind.CLIENT);

    /** Who has to change something. */
    public enum Kind {
        /** The request must change before it can work. */
        REQUEST,
        /** The request was fine, and the service could not take or finish it. */
        SERVICE,
        /** The daemon cannot be reached, or the conversation with it broke. */
        CONNECTION,
        /** The calling program. */
        CLIENT
    }

    private static final Map<String, ErrorCode> BY_TEXT =
            Stream.of(values()).collect(Collectors.toUnmodifiableMap(ErrorCode::text, one -> one));

    private final Kind kind;

    ErrorCode(Kind kind) {
        this.kind = kind;
    }

    /** {@return who has to change something} */
    public Kind kind() {
        return kind;
    }

    /** {@return the code as it stands in messages} */
    public String text() {
        return name().toLowerCase(Locale.ROOT);
    }

    /** The code of an answer; one that is unknown here means {@link #INTERNAL}. */
    static ErrorCode of(String text) {
        // Without a session the daemon knows nothing of what was open.
        return text.equals("hello_required") ? CONNECTION_LOST : BY_TEXT.getOrDefault(text, INTERNAL);
    }
}
