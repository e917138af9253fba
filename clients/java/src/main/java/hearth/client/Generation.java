package hearth.client;

import hearth.client.Answers.Accepted;
import hearth.client.Answers.Delta;
import hearth.client.Answers.Done;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Collections;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.Flow;
import java.util.concurrent.TimeoutException;

/**
 * A reply as it comes: iterate it, subscribe to it, or wait for all of it with {@link #text}. Closing
 * it before its end cancels it. It belongs to one reader; {@link #cancel} and {@link #close} may be
 * called by any thread.
 *
 * <p>What nobody reads is kept, up to 32 MiB; beyond that the generation ends with slow_client.
 */
public final class Generation
        implements Iterable<Delta>, Flow.Publisher<Delta>, AutoCloseable {
    /** One reply as far as it has been read. */
    public static final class Reply {
        private final StringBuilder text = new StringBuilder();
        private final StringBuilder reasoning = new StringBuilder();
        private final List<Integer> tokens = new ArrayList<>();
        private final Map<Integer, Call> calls = new TreeMap<>();

        private static final class Call {
            private String id = "";
            private String name = "";
            private final StringBuilder arguments = new StringBuilder();
        }

        private Reply() {}

        private void add(Delta delta) {
            text.append(delta.text());
            reasoning.append(delta.reasoning());
            tokens.addAll(delta.tokens());
            for (Answers.CallPiece piece : delta.toolCalls()) {
                Call call = calls.computeIfAbsent(piece.index(), index -> new Call());
                call.id += piece.id();
                call.name += piece.name();
                call.arguments.append(piece.arguments());
            }
        }

        /** {@return the answer} */
        public String text() {
            return text.toString();
        }

        /** {@return the model's reasoning before it} */
        public String reasoning() {
            return reasoning.toString();
        }

        /** {@return its token ids} */
        public List<Integer> tokens() {
            return Collections.unmodifiableList(tokens);
        }

        /** {@return the calls that are whole, in their order; the last one may have been cut} */
        public List<Message.ToolCall> toolCalls() {
            List<Message.ToolCall> whole = new ArrayList<>();
            for (Call call : calls.values()) {
                try {
                    Map<String, Object> arguments = object(Json.parse(call.arguments.toString()));
                    whole.add(new Message.ToolCall(call.id, call.name, arguments));
                } catch (IllegalArgumentException ignored) {
                    // It was cut by max_tokens.
                }
            }
            return whole;
        }

        @SuppressWarnings("unchecked") // Keys of a JSON object are text.
        private static Map<String, Object> object(Object value) {
            if (value instanceof Map<?, ?> map) {
                return (Map<String, Object>) map;
            }
            throw new IllegalArgumentException("arguments are no object");
        }

        /**
         * The turn that this reply is in a conversation, without a call that was cut.
         *
         * @return the turn
         * @throws HearthException reply_empty where that leaves nothing, which no daemon takes
         */
        public Message message() {
            List<Message.ToolCall> whole = toolCalls();
            if (text.length() == 0 && whole.isEmpty()) {
                String wrong = "the reply is no turn, it has no text and no whole call: ask for more tokens";
                throw HearthException.of(ErrorCode.REPLY_EMPTY, wrong);
            }
            List<Message.Part> content =
                    text.length() == 0 ? List.of() : List.of(new Message.Text(text()));
            return new Message(Message.Role.ASSISTANT, content, reasoning(), whole, "");
        }
    }

    private final Session session;
    private final Exchange exchange;
    private final Executor executor;
    private final Map<Integer, Reply> replies = new TreeMap<>(Map.of(0, new Reply()));
    private boolean isSubscribed;

    Generation(Session session, Exchange exchange, Executor executor) {
        this.session = session;
        this.exchange = exchange;
        this.executor = executor;
    }

    /**
     * The deltas; each call goes on where the one before stopped. {@code hasNext} waits, and throws a
     * {@link HearthException} where the generation failed.
     */
    @Override
    public Iterator<Delta> iterator() {
        return new Iterator<>() {
            private Delta next;

            @Override
            public boolean hasNext() {
                next = next == null ? read() : next;
                return next != null;
            }

            @Override
            public Delta next() {
                if (!hasNext()) {
                    throw new NoSuchElementException("the reply has ended");
                }
                Delta found = next;
                next = null;
                return found;
            }
        };
    }

    /**
     * Waits for the next delta.
     *
     * @param time how long
     * @return it; empty at the end
     * @throws TimeoutException where neither comes; the generation goes on
     * @throws HearthException where the generation failed
     */
    public Optional<Delta> next(Duration time) throws TimeoutException {
        if (!exchange.await(time)) {
            throw new TimeoutException("nothing of the reply came within " + time);
        }
        return Optional.ofNullable(take());
    }

    /**
     * Waits for the end.
     *
     * @return the text of the first reply, with what was read before
     * @throws HearthException where the generation failed
     */
    public String text() {
        done();
        return replies.get(0).text();
    }

    /**
     * Waits for the end.
     *
     * @return the turn of the first reply, to go on with in a conversation
     * @throws HearthException where the generation failed, or reply_empty
     */
    public Message message() {
        done();
        return replies.get(0).message();
    }

    /**
     * Waits for the end, and reads the deltas before it.
     *
     * @return the reason and the usage
     * @throws HearthException where the generation failed
     */
    public Done done() {
        while (read() != null) {
            // The replies have it.
        }
        return (Done) HearthClient.join(exchange.end);
    }

    /** {@return what was read of the first reply} */
    public Reply reply() {
        return replies.get(0);
    }

    /** {@return what was read of all replies that have begun, in their order} */
    public Collection<Reply> replies() {
        return Collections.unmodifiableCollection(replies.values());
    }

    /**
     * The daemon's notice that the request is in the queue. It fails as the generation does, and is
     * cancelled where the daemon goes on without one.
     *
     * @return the notice once it comes
     */
    public CompletableFuture<Accepted> accepted() {
        return exchange.accepted.thenApplyAsync(found -> found, executor);
    }

    /**
     * The end, however the deltas are read.
     *
     * @return it once it comes, or a {@link HearthException}
     */
    public CompletableFuture<Done> completion() {
        return exchange.end.thenApplyAsync(Done.class::cast, executor);
    }

    /** Asks the daemon to end the generation, which then is done with the reason cancelled. */
    public void cancel() {
        if (!exchange.end.isDone()) {
            session.cancel(exchange);
        }
    }

    /** Cancels the generation unless it has ended. */
    @Override
    public void close() {
        cancel();
    }

    /**
     * Gives the deltas to one subscriber, as many as it requests, on the client's executor. Its
     * cancellation ends the generation.
     */
    @Override
    public void subscribe(Flow.Subscriber<? super Delta> subscriber) {
        boolean isFirst;
        synchronized (this) {
            isFirst = !isSubscribed;
            isSubscribed = true;
        }
        Subscription subscription = new Subscription(this, subscriber, executor);
        subscriber.onSubscribe(subscription);
        if (isFirst) {
            exchange.onChange(subscription::wake);
            subscription.wake();
        } else {
            subscription.refuse(new IllegalStateException("a generation has one subscriber"));
        }
    }

    /** The next delta, null at the end; waits. */
    private Delta read() {
        exchange.await(null);
        return take();
    }

    private Delta take() {
        Delta delta = poll();
        if (delta == null) {
            HearthClient.join(exchange.end);
        }
        return delta;
    }

    /** A delta that has come, null where none has. */
    Delta poll() {
        Delta delta = exchange.poll();
        if (delta != null) {
            replies.computeIfAbsent(delta.choice(), choice -> new Reply()).add(delta);
        }
        return delta;
    }

    boolean hasUnread() {
        return exchange.hasUnread();
    }

    CompletableFuture<Object> completed() {
        return exchange.end;
    }
}
