package hearth.client;

import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.InvalidPathException;
import java.nio.file.Path;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executor;
import java.util.function.Function;

/**
 * A session with the daemon, for any number of threads and requests at once.
 *
 * <p>The first request opens the session, and so does the first one after a loss: it waits for a
 * daemon that went away until the timeout after the loss is over. Every method that waits may throw
 * {@link HearthException}.
 */
public final class HearthClient implements AutoCloseable {
    /** What a client reads of answers unless it is told otherwise. */
    public static final List<String> FEATURES =
            List.of("reasoning", "tool_calls", "end_details", "token_bytes");

    private static final int MAX_PATH_BYTES = 107;
    private static final long CLOSE_MILLIS = 1000;
    private static final Path SYSTEM_PATH = Path.of("/run/hearth/hearth.sock");

    private final Session session;
    private final Executor executor;
    private final Thread thread;

    private HearthClient(Builder builder) {
        executor = builder.executor;
        session =
                new Session(
                        new Session.Settings(
                                path(builder.address),
                                builder.timeout,
                                builder.silence,
                                builder.answerTimeout,
                                Map.copyOf(builder.hello)));
        thread = new Thread(session, "hearth-client");
        thread.setDaemon(true);
        thread.start();
    }

    /** Options of a client. */
    public static final class Builder {
        private final Map<String, Object> hello = new LinkedHashMap<>();
        private String address = "";
        private Duration timeout = Duration.ofSeconds(5);
        private Duration silence = Duration.ofSeconds(20);
        private Duration answerTimeout = Duration.ofMinutes(10);
        private Executor executor = new CompletableFuture<Void>().defaultExecutor();

        private Builder() {
            name("hearth-client-java").features(FEATURES);
        }

        /**
         * Sets where the daemon listens.
         *
         * @param address a path, may begin with {@code ipc://}; default {@code $HEARTH_SOCKET}, else
         *     the agreed places
         * @return this
         */
        public Builder address(String address) {
            this.address = address;
            return this;
        }

        /**
         * Sets the wait for the daemon's welcome.
         *
         * @param time default 5 seconds
         * @return this
         */
        public Builder timeout(Duration time) {
            timeout = positive(time, "timeout");
            return this;
        }

        /**
         * Sets the time without any answer after which the daemon counts as gone.
         *
         * @param time default 20 seconds
         * @return this
         */
        public Builder silence(Duration time) {
            silence = positive(time, "silence");
            return this;
        }

        /**
         * Sets the longest time without an answer to a request, after which it ends with
         * connection_timeout. It includes the wait in the daemon's queue.
         *
         * @param time default 10 minutes
         * @return this
         */
        public Builder answerTimeout(Duration time) {
            answerTimeout = positive(time, "answerTimeout");
            return this;
        }

        /**
         * Sets the lease that is asked for; the client renews it by itself.
         *
         * @param time 1 second to an hour; default the daemon's
         * @return this
         */
        public Builder lease(Duration time) {
            hello.put("lease_s", time.toNanos() / 1e9);
            return this;
        }

        /**
         * Sets the name in the daemon's log.
         *
         * @param name at most 128 characters, which are code points
         * @return this
         */
        public Builder name(String name) {
            if (name.codePointCount(0, name.length()) > 128) {
                throw HearthException.of(
                        ErrorCode.INVALID_VALUE, "a client's name has 128 characters at most", "client");
            }
            hello.put("client", name);
            return this;
        }

        /**
         * Sets what the client reads of answers beyond the first version.
         *
         * @param names default {@link HearthClient#FEATURES}
         * @return this
         */
        public Builder features(List<String> names) {
            if (names.isEmpty()) {
                hello.remove("features");
            } else {
                hello.put("features", List.copyOf(names));
            }
            return this;
        }

        /**
         * Sets that only status is asked for, which has a place where all others are taken.
         *
         * @param only default false
         * @return this
         */
        public Builder statusOnly(boolean only) {
            hello.put("status_only", only);
            return this;
        }

        /**
         * Sets who runs what depends on futures, and subscribers. It must not run tasks in the thread
         * that gives them, which is the one that renews the lease.
         *
         * @param executor default that of {@link CompletableFuture}
         * @return this
         */
        public Builder executor(Executor executor) {
            this.executor = executor;
            return this;
        }

        /**
         * Makes the client, which opens its session with the first request.
         *
         * @return the client
         * @throws HearthException where the address is none
         */
        public HearthClient build() {
            return new HearthClient(this);
        }

        private static Duration positive(Duration time, String name) {
            if (time.isZero() || time.isNegative() || time.compareTo(Duration.ofDays(365)) > 0) {
                String text = name + " is more than nothing and a year at most";
                throw HearthException.of(ErrorCode.INVALID_VALUE, text, name);
            }
            return time;
        }
    }

    /** {@return options of a client} */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * A client of the daemon at the agreed place, connected.
     *
     * @return the client
     * @throws HearthException where no daemon answers
     */
    public static HearthClient open() {
        HearthClient client = builder().build();
        try {
            client.connect();
            return client;
        } catch (RuntimeException error) {
            client.close();
            throw error;
        }
    }

    /**
     * Opens a session unless one is open.
     *
     * @return the daemon's welcome
     */
    public Answers.Welcome connect() {
        return (Answers.Welcome) join(session.connect().end);
    }

    /**
     * Opens a session unless one is open.
     *
     * @return the daemon's welcome, once it comes
     */
    public CompletableFuture<Answers.Welcome> connectAsync() {
        return later(session.connect(), Answers.Welcome.class::cast);
    }

    /**
     * Starts a generation; returns at once.
     *
     * @param request what to ask, which may be changed and used again afterwards
     * @return the reply as it comes
     * @throws HearthException invalid_value for what no message can hold
     */
    public Generation generate(Generate request) {
        return new Generation(session, ask(request, Answers.Done.class), executor);
    }

    /**
     * Asks for token ids.
     *
     * @param request of a text or a conversation
     * @return the ids
     */
    public List<Integer> tokenize(Tokenize request) {
        return ((Answers.Tokens) join(ask(request, Answers.Tokens.class).end)).tokens();
    }

    /**
     * Asks for token ids.
     *
     * @param request of a text or a conversation
     * @return the ids, once they come
     */
    public CompletableFuture<List<Integer>> tokenizeAsync(Tokenize request) {
        return later(
                ask(request, Answers.Tokens.class), answer -> ((Answers.Tokens) answer).tokens());
    }

    /**
     * Asks for the text of tokens.
     *
     * @param tokens their ids
     * @return the text
     */
    public String detokenize(List<Integer> tokens) {
        return ((Answers.Text) join(askText(tokens).end)).text();
    }

    /**
     * Asks for the text of tokens.
     *
     * @param tokens their ids
     * @return the text, once it comes
     */
    public CompletableFuture<String> detokenizeAsync(List<Integer> tokens) {
        return later(askText(tokens), answer -> ((Answers.Text) answer).text());
    }

    /** {@return what the daemon serves and does} */
    public Answers.StatusReport status() {
        return (Answers.StatusReport) join(askStatus().end);
    }

    /** {@return what the daemon serves and does, once it tells} */
    public CompletableFuture<Answers.StatusReport> statusAsync() {
        return later(askStatus(), Answers.StatusReport.class::cast);
    }

    /** Ends the session; what is open ends with client_closed. */
    @Override
    public void close() {
        session.close();
        try {
            thread.join(CLOSE_MILLIS);
        } catch (InterruptedException cause) {
            Thread.currentThread().interrupt();
        }
    }

    private Exchange ask(Request<?> request, Class<?> ends) {
        return session.request(request.kind(), request.fields(), ends);
    }

    private Exchange askText(List<Integer> tokens) {
        return session.request("detokenize", Map.of("tokens", tokens), Answers.Text.class);
    }

    private Exchange askStatus() {
        return session.request("status", Map.of(), Answers.StatusReport.class);
    }

    private <T> CompletableFuture<T> later(Exchange exchange, Function<Object, T> found) {
        return exchange.end.thenApplyAsync(found, executor);
    }

    /** Waits for a future; its failure is thrown with the stack of this thread. */
    static Object join(CompletableFuture<?> future) {
        try {
            return future.get();
        } catch (InterruptedException cause) {
            throw Exchange.interrupted(cause);
        } catch (ExecutionException | CompletionException | CancellationException cause) {
            if (cause.getCause() instanceof HearthException error) {
                throw error.here();
            }
            throw cause instanceof RuntimeException error ? error : new IllegalStateException(cause);
        }
    }

    private static Path path(String address) {
        String named = address.isEmpty() ? System.getenv().getOrDefault("HEARTH_SOCKET", "") : address;
        String text = named.startsWith("ipc://") ? named.substring("ipc://".length()) : named;
        if (text.contains("://")) {
            throw failed(text + " is no local socket: give a path or ipc://PATH");
        }
        try {
            Path path = text.isEmpty() ? agreedPath() : Path.of(text);
            int size = path.toString().getBytes(StandardCharsets.UTF_8).length;
            if (size > MAX_PATH_BYTES) {
                throw failed(path + " has " + size + " bytes, where " + MAX_PATH_BYTES + " are possible");
            }
            return path;
        } catch (InvalidPathException cause) {
            throw failed(text + " is no path: " + cause.getReason());
        }
    }

    /** The user's own place or the system's: the first that exists, or may in a closed folder. */
    private static Path agreedPath() {
        String folder = System.getenv().getOrDefault("XDG_RUNTIME_DIR", "");
        Path own = folder.isEmpty() ? SYSTEM_PATH : Path.of(folder, "hearth", "hearth.sock");
        return !Files.notExists(own) || Files.notExists(SYSTEM_PATH) ? own : SYSTEM_PATH;
    }

    private static HearthException failed(String text) {
        return HearthException.of(ErrorCode.CONNECTION_FAILED, text);
    }
}
