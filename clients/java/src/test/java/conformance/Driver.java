package conformance;

import hearth.client.Answers;
import hearth.client.Generation;
import hearth.client.HearthClient;
import hearth.client.HearthException;
import hearth.client.Json;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;

/** Driver of clients/conformance: commands on standard input, events on standard output. */
public final class Driver {
    private final PrintStream out =
            new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);
    private final String address;
    private final Map<String, Generation> generations = new HashMap<>();
    private final Map<String, CompletableFuture<Void>> mayRead = new HashMap<>();
    private final List<CompletableFuture<?>> work = new ArrayList<>();
    private final List<Thread> readers = new ArrayList<>();
    private HearthClient client;

    private Driver(String address) {
        this.address = address;
    }

    /**
     * Runs until {@code close} or the end of the input.
     *
     * @param arguments the daemon's address
     * @throws IOException where the input cannot be read
     * @throws InterruptedException never
     */
    public static void main(String[] arguments) throws IOException, InterruptedException {
        Driver driver = new Driver(arguments[0]);
        var in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        String line = in.readLine();
        while (line != null && driver.take((Map<?, ?>) Json.parse(line))) {
            line = in.readLine();
        }
        driver.close();
    }

    private boolean take(Map<?, ?> command) {
        String name = (String) command.get("as");
        Map<?, ?> request = (Map<?, ?>) command.get("request");
        switch ((String) command.get("do")) {
            case "connect" -> connect(command);
            case "generate" -> generate(name, request, !Boolean.FALSE.equals(command.get("read")));
            case "read" -> mayRead.get(name).complete(null);
            case "cancel" -> {
                if (generations.containsKey(name)) {
                    generations.get(name).cancel();
                }
            }
            case "tokenize", "detokenize", "status" -> ask((String) command.get("do"), name, request);
            case "close" -> {
                return false;
            }
            default -> throw new IllegalArgumentException("no command " + command);
        }
        return true;
    }

    private void connect(Map<?, ?> command) {
        if (client != null) {
            client.close();
        }
        var builder = HearthClient.builder().address(address);
        try {
            if (command.get("timeout_s") instanceof Number seconds) {
                builder.timeout(duration(seconds));
            }
            if (command.get("silence_s") instanceof Number seconds) {
                builder.silence(duration(seconds));
            }
            if (command.get("lease_s") instanceof Number seconds) {
                builder.lease(duration(seconds));
            }
            if (command.get("name") instanceof String name) {
                builder.name(name);
            }
            if (command.get("features") instanceof List<?> features) {
                builder.features(features.stream().map(String.class::cast).toList());
            }
            client = builder.build();
        } catch (HearthException error) {
            fail(null, error);
            return;
        }
        watch(
                null,
                client.connectAsync(),
                welcome -> tell("connected", null, Map.of("welcome", Told.map(welcome))));
    }

    private void generate(String name, Map<?, ?> fields, boolean isRead) {
        Generation generation;
        try {
            generation = connected().generate(Commands.generate(fields));
        } catch (HearthException error) {
            fail(name, error);
            return;
        }
        CompletableFuture<Void> mayBeRead = new CompletableFuture<>();
        generations.put(name, generation);
        mayRead.put(name, mayBeRead);
        if (isRead) {
            mayBeRead.complete(null);
        }
        Thread reader = new Thread(() -> read(name, generation, mayBeRead));
        readers.add(reader);
        reader.start();
    }

    private void read(String name, Generation generation, CompletableFuture<Void> mayBeRead) {
        try {
            long tokens = generation.accepted().join().promptTokens();
            tell("accepted", name, Map.of("prompt_tokens", tokens));
        } catch (CancellationException | CompletionException ignored) {
            // What follows tells why it has not come.
        }
        mayBeRead.join();
        try {
            for (Answers.Delta delta : generation) {
                tell("delta", name, Told.map(delta));
            }
            tell("done", name, Told.map(generation.done()));
        } catch (HearthException error) {
            fail(name, error);
        }
    }

    private void ask(String what, String name, Map<?, ?> request) {
        try {
            switch (what) {
                case "tokenize" -> watch(
                        name,
                        connected().tokenizeAsync(Commands.tokenize(request)),
                        tokens -> tell("tokens", name, Map.of("tokens", tokens)));
                case "detokenize" -> watch(
                        name,
                        connected().detokenizeAsync(tokens(request)),
                        text -> tell("text", name, Map.of("text", text)));
                default -> watch(
                        name,
                        connected().statusAsync(),
                        report -> tell("status_report", name, Told.map(report)));
            }
        } catch (HearthException error) {
            fail(name, error);
        }
    }

    private static List<Integer> tokens(Map<?, ?> request) {
        List<Integer> found = new ArrayList<>();
        ((List<?>) request.get("tokens")).forEach(one -> found.add(((Number) one).intValue()));
        return found;
    }

    private <T> void watch(
            String name, CompletableFuture<T> future, java.util.function.Consumer<T> tell) {
        work.add(
                future.thenAccept(tell)
                        .exceptionally(
                                cause -> {
                                    fail(name, (HearthException) cause.getCause());
                                    return null;
                                }));
    }

    private HearthClient connected() {
        client = client == null ? HearthClient.builder().address(address).build() : client;
        return client;
    }

    private void close() throws InterruptedException {
        if (client != null) {
            client.close();
        }
        mayRead.values().forEach(one -> one.complete(null));
        for (Thread reader : readers) {
            reader.join();
        }
        work.forEach(CompletableFuture::join);
        tell("closed", null, Map.of());
    }

    private void fail(String name, HearthException error) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("code", error.codeText());
        fields.put("message", error.getMessage());
        fields.put("kind", error.code().kind().name().toLowerCase(Locale.ROOT));
        if (!error.field().isEmpty()) {
            fields.put("field", error.field());
        }
        error.retryAfter().ifPresent(time -> fields.put("retry_after_s", time.toNanos() / 1e9));
        error.usage().ifPresent(usage -> fields.put("usage", Told.map(usage)));
        tell("failed", name, fields);
    }

    private synchronized void tell(String event, String name, Map<String, ?> fields) {
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("event", event);
        if (name != null) {
            told.put("as", name);
        }
        told.putAll(fields);
        told.remove("seq");
        out.println(Json.write(told));
        out.flush();
    }

    private static Duration duration(Number seconds) {
        return Duration.ofNanos((long) (seconds.doubleValue() * 1e9));
    }
}
