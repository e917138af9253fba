package hearth.client;

import hearth.client.Answers.Delta;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Flow;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeoutException;

/** Tests of sessions with a daemon that says what it is told to. */
final class Sessions {
    private static final Generate REQUEST = Generate.prompt("Tell");

    private final Check check;

    Sessions(Check check) {
        this.check = check;
    }

    /** A test with a client that has a session. */
    private interface Body {
        void run(FakeDaemon daemon, HearthClient client) throws Exception;
    }

    private void test(String name, Body body) {
        test(name, Duration.ofMinutes(1), body);
    }

    private void test(String name, Duration answerTimeout, Body body) {
        check.test(
                name,
                () -> {
                    try (FakeDaemon daemon = new FakeDaemon();
                            HearthClient client = daemon.builder().answerTimeout(answerTimeout).build()) {
                        var connected = client.connectAsync();
                        daemon.welcome();
                        Check.equal(connected.get().server(), "fake");
                        body.run(daemon, client);
                    }
                });
    }

    void run() {
        reading();
        subscribing();
        failing();
        sending();
    }

    private void reading() {
        test("leaving a try cancels", (daemon, client) -> {
            try (Generation reply = client.generate(REQUEST)) {
                String id = daemon.start();
                daemon.delta(id, 0, "so ");
                Check.equal(reply.iterator().next().text(), "so ");
            }
            daemon.take("cancel");
        });
        test("a wait for a delta has an end", (daemon, client) -> {
            Generation reply = client.generate(REQUEST);
            String id = daemon.start();
            try {
                throw new AssertionError(reply.next(Duration.ofMillis(1)));
            } catch (TimeoutException due) {
                daemon.delta(id, 0, "late");
            }
            Check.equal(reply.next(Duration.ofMinutes(1)).get().text(), "late");
            daemon.done(id, "stop");
            Check.equal(reply.next(Duration.ofMinutes(1)).isEmpty(), true);
            Check.equal(reply.accepted().get().promptTokens(), 3L);
            Check.equal(reply.completion().get(), reply.done());
        });
        test("a reply is a turn of the conversation", (daemon, client) -> {
            Generation reply = client.generate(REQUEST);
            String id = daemon.start();
            Map<String, ?> first = Map.of("index", 0, "id", "c0", "name", "f", "arguments", "{\"on\":");
            Map<String, ?> cut = Map.of("index", 1, "id", "c1", "name", "f", "arguments", "{\"o");
            daemon.say("delta", Map.of(
                    "id", id, "seq", 0, "text", "", "reasoning", "Hm.", "tool_calls", List.of(first, cut)));
            Map<String, ?> more = Map.of("index", 0, "arguments", "true}");
            daemon.say("delta", Map.of("id", id, "seq", 1, "text", "", "tool_calls", List.of(more)));
            daemon.done(id, "length");
            Message turn = reply.message();
            Check.equal(turn.toolCalls(), List.of(new Message.ToolCall("c0", "f", Map.of("on", true))));
            Check.equal(turn.reasoning(), "Hm.");
            client.generate(Generate.messages(turn, Message.result(turn.toolCalls().get(0), "")));
            List<?> sent = (List<?>) daemon.take("generate").get("messages");
            Check.equal(((Map<?, ?>) sent.get(0)).containsKey("content"), false);
            Check.equal(sent.get(1), Map.of("role", "tool", "content", "", "tool_call_id", "c0"));
        });
        test("an empty reply is no turn", (daemon, client) -> {
            Generation reply = client.generate(REQUEST);
            daemon.done(daemon.start(), "length");
            Check.equal(Check.failure(reply::message), ErrorCode.REPLY_EMPTY);
        });
        test("an interrupted wait says so", (daemon, client) -> {
            Generation reply = client.generate(REQUEST);
            Thread.currentThread().interrupt();
            Check.equal(Check.failure(reply::text), ErrorCode.INTERRUPTED);
            Check.equal(Thread.interrupted(), true);
            daemon.done(daemon.start(), "stop");
            Check.equal(reply.text(), "");
        });
        test("what nobody reads is bounded", (daemon, client) -> {
            Generation reply = client.generate(REQUEST);
            String id = daemon.start();
            String text = "x".repeat(1 << 20);
            for (int seq = 0; seq < 17; seq++) {
                daemon.delta(id, seq, text);
            }
            daemon.take("cancel");
            Check.equal(Check.failure(reply::text), ErrorCode.SLOW_CLIENT);
            Check.equal(reply.reply().text().length() >= 4 << 20, true);
            var status = client.tokenizeAsync(Tokenize.text("on"));
            daemon.say("tokens", Map.of("id", daemon.take("tokenize").get("id"), "tokens", List.of(7)));
            Check.equal(status.get(), List.of(7));
        });
    }

    /** What came to a subscriber, in words. */
    private static class Told implements Flow.Subscriber<Delta> {
        private final BlockingQueue<String> events = new LinkedBlockingQueue<>();
        private Flow.Subscription subscription;

        @Override
        public void onSubscribe(Flow.Subscription given) {
            subscription = given;
        }

        @Override
        public void onNext(Delta delta) {
            events.add(delta.text());
        }

        @Override
        public void onError(Throwable error) {
            events.add(error instanceof HearthException one ? one.codeText() : error.getMessage());
        }

        @Override
        public void onComplete() {
            events.add("complete");
        }
    }

    private void subscribing() {
        test("a subscriber gets what it requests", (daemon, client) -> {
            Told told = new Told();
            client.generate(REQUEST).subscribe(told);
            String id = daemon.start();
            for (int seq = 0; seq < 3; seq++) {
                daemon.delta(id, seq, "d" + seq);
            }
            daemon.done(id, "stop");
            told.subscription.request(2);
            Check.equal(told.events.take() + told.events.take(), "d0d1");
            Check.equal(told.events.poll(), null);
            told.subscription.request(Long.MAX_VALUE);
            told.subscription.request(Long.MAX_VALUE);
            Check.equal(told.events.take() + told.events.take(), "d2complete");
        });
        test("a subscriber learns of a failure", (daemon, client) -> {
            Told told = new Told();
            client.generate(REQUEST).subscribe(told);
            daemon.start();
            daemon.hangUp();
            Check.equal(told.events.take(), "connection_lost");
        });
        test("a subscriber that cancels ends the generation", (daemon, client) -> {
            Told told = new Told();
            client.generate(REQUEST).subscribe(told);
            daemon.start();
            told.subscription.cancel();
            daemon.take("cancel");
        });
        for (Throwable thrown : List.of(new IllegalStateException(), new AssertionError())) {
            test("a subscriber that throws ends the generation: " + thrown, (daemon, client) -> {
                Told told = new Told() {
                    @Override
                    public void onNext(Delta delta) {
                        if (thrown instanceof Error error) {
                            throw error;
                        }
                        throw (RuntimeException) thrown;
                    }
                };
                client.generate(REQUEST).subscribe(told);
                told.subscription.request(1);
                daemon.delta(daemon.start(), 0, "x");
                daemon.take("cancel");
            });
        }
        test("a second subscriber and a request of nothing are refused", (daemon, client) -> {
            Generation reply = client.generate(REQUEST);
            Told first = new Told();
            reply.subscribe(first);
            Told second = new Told();
            reply.subscribe(second);
            Check.equal(second.events.take(), "a generation has one subscriber");
            first.subscription.request(0);
            Check.equal(first.events.take(), "a subscriber requests 1 delta or more");
        });
    }

    private void failing() {
        test("a request without an answer ends", Duration.ofMillis(50), (daemon, client) -> {
            Generation reply = client.generate(REQUEST);
            daemon.take("generate");
            daemon.take("cancel");
            Check.equal(Check.failure(reply::done), ErrorCode.CONNECTION_TIMEOUT);
        });
        test("closing ends what waits", (daemon, client) -> {
            Generation reply = client.generate(REQUEST);
            daemon.start();
            client.close();
            daemon.take("bye");
            Check.equal(Check.failure(reply::text), ErrorCode.CLIENT_CLOSED);
            Check.equal(Check.failure(client::status), ErrorCode.CLIENT_CLOSED);
        });
        test("a failure has its details in the thread that waits", (daemon, client) -> {
            Generation reply = client.generate(REQUEST);
            String id = daemon.start();
            daemon.say("error", Map.of(
                    "id", id, "code", "queue_full", "message", "Later.", "field", "q", "retry_after_s", 2));
            try {
                throw new AssertionError(reply.text());
            } catch (HearthException.ServiceFailed error) {
                Check.equal(error.retryAfter().get(), Duration.ofSeconds(2));
                Check.equal(error.field() + error.getMessage(), "qLater.");
                Check.equal(Arrays.toString(error.getStackTrace()).contains("Sessions"), true);
            }
        });
        for (double lease : new double[] {0, -1}) {
            test("a lease that cannot be: " + lease, (daemon, client) -> {
                Generation reply = client.generate(REQUEST);
                daemon.start();
                daemon.say("welcome", daemon.greeting(1, lease));
                Check.equal(Check.failure(reply::done), ErrorCode.PROTOCOL_VIOLATION);
            });
        }
        test("another protocol", (daemon, client) -> {
            Generation reply = client.generate(REQUEST);
            daemon.start();
            daemon.say("welcome", daemon.greeting(2, 30));
            Check.equal(Check.failure(reply::done), ErrorCode.UNSUPPORTED_PROTOCOL);
        });
        test("a future fails with the failure", (daemon, client) -> {
            var status = client.statusAsync();
            daemon.say("error", Map.of(
                    "id", daemon.take("status").get("id"), "code", "of_tomorrow", "message", "No."));
            try {
                throw new AssertionError(status.get());
            } catch (ExecutionException error) {
                Check.equal(((HearthException) error.getCause()).codeText(), "of_tomorrow");
                Check.equal(((HearthException) error.getCause()).code(), ErrorCode.INTERNAL);
            }
        });
        test("a request behind a loss has a new session and keeps its features", (daemon, client) -> {
            Generation open = client.generate(REQUEST);
            daemon.start();
            daemon.hangUp();
            Check.equal(Check.failure(open::done), ErrorCode.CONNECTION_LOST);
            var status = client.detokenizeAsync(List.of(1));
            Check.equal(daemon.accept().get("features"), HearthClient.FEATURES);
            daemon.say("welcome", Map.of("proto", 1, "server", "x", "limits", FakeDaemon.LIMITS));
            daemon.say("text", Map.of("id", daemon.take("detokenize").get("id"), "text", "on"));
            Check.equal(status.get(), "on");
        });
    }

    private void sending() {
        test("pictures larger than a socket takes arrive whole", (daemon, client) -> {
            byte[] pixels = new byte[12 << 20];
            new Random(1).nextBytes(pixels);
            Image image = Image.of(ByteBuffer.wrap(pixels), "rgb8", 2048, 2048);
            Image small = Image.of(ByteBuffer.wrap(new byte[3]), "rgb8", 1, 1);
            client.generate(Generate.messages(Message.user(image, small)));
            var other = client.statusAsync();
            daemon.take("generate");
            Check.equal(Arrays.equals(daemon.frame(), pixels), true);
            Check.equal(daemon.frame().length, 3);
            daemon.take("status");
            Check.equal(other.isDone(), false);
        });
        test("a PING is answered", (daemon, client) -> {
            daemon.write(ByteBuffer.wrap(new byte[] {4, 8, 4, 'P', 'I', 'N', 'G', 0, 9, 'x'}));
            Check.equal(new String(daemon.frame(), StandardCharsets.US_ASCII), "\4PONGx");
        });
        test("PINGs of a daemon that takes no PONG are bounded", (daemon, client) -> {
            Generation reply = client.generate(REQUEST);
            daemon.take("generate");
            ByteBuffer pings = ByteBuffer.allocate(9000);
            while (pings.hasRemaining()) {
                pings.put(new byte[] {4, 7, 4, 'P', 'I', 'N', 'G', 0, 9});
            }
            try {
                while (true) {
                    daemon.write(pings.rewind());
                }
            } catch (IOException hungUp) {
                Check.equal(Check.failure(reply::text), ErrorCode.CONNECTION_TIMEOUT);
            }
        });
        check.test("requests wait for the session, in their order", () -> {
            try (FakeDaemon daemon = new FakeDaemon(); HearthClient client = daemon.builder().build()) {
                List<CompletableFuture<List<Integer>>> asked = new ArrayList<>();
                for (int i = 0; i < 3; i++) {
                    asked.add(client.tokenizeAsync(Tokenize.text("" + i)));
                }
                Generation given = client.generate(REQUEST);
                given.cancel();
                daemon.accept();
                Check.equal(given.done().reason(), "cancelled");
                daemon.say("welcome", Map.of("proto", 1, "server", "x", "limits", FakeDaemon.LIMITS));
                for (int i = 0; i < 3; i++) {
                    Map<?, ?> message = daemon.take("tokenize");
                    Check.equal(message.get("text"), "" + i);
                    daemon.say("tokens", Map.of("id", message.get("id"), "tokens", List.of(i)));
                }
                for (int i = 0; i < 3; i++) {
                    Check.equal(asked.get(i).get(), List.of(i));
                }
            }
        });
    }
}
