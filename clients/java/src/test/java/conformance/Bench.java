package conformance;

import hearth.client.Generate;
import hearth.client.HearthClient;
import hearth.client.Image;
import hearth.client.Message;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.SecureRandom;
import java.util.ArrayList;
import java.util.Locale;
import java.util.function.DoubleSupplier;
import java.util.stream.DoubleStream;

/** The bench of clients/conformance/BENCH.md: one JSON object on standard output. */
final class Bench {
    private static final int SIDE = 512;
    private static final int SESSIONS = 32;

    private Bench() {}

    public static void main(String[] arguments) throws IOException {
        try (var client = open(arguments[0])) {
            long before = residentKb();
            var more = new ArrayList<HearthClient>();
            for (int i = 0; i < SESSIONS; i++) {
                more.add(open(arguments[0]));
            }
            double session = (double) (residentKb() - before) / SESSIONS;
            more.forEach(HearthClient::close);
            double status = median(200, () -> seconds(client::status));
            double delta = median(20, () -> deltaSeconds(client));
            double image = median(10, () -> imageSeconds(client));
            System.out.printf(
                    Locale.ROOT,
                    "{\"status_us\": %.3f, \"delta_us\": %.3f, \"image_ms\": %.4f, \"rss_kb\": %.2f}%n",
                    1e6 * status, 1e6 * delta, 1e3 * image, session);
        }
    }

    private static HearthClient open(String address) {
        var client = HearthClient.builder().address(address).build();
        client.status();
        return client;
    }

    private static double seconds(Runnable task) {
        long began = System.nanoTime();
        task.run();
        return 1e-9 * (System.nanoTime() - began);
    }

    private static double deltaSeconds(HearthClient client) {
        var deltas = new int[1];
        var request = Generate.prompt("Once upon a time").maxTokens(256).ignoreEos(true);
        return seconds(() -> {
            try (var reply = client.generate(request)) {
                reply.forEach(delta -> deltas[0]++);
            }
        }) / deltas[0];
    }

    private static double imageSeconds(HearthClient client) {
        var seed = new byte[64];
        new SecureRandom().nextBytes(seed);
        var pixels = ByteBuffer.allocate(4 * SIDE * SIDE);
        while (pixels.hasRemaining()) {
            pixels.put(seed);
        }
        pixels.flip();
        return seconds(() -> {
            var turn = Message.user(Image.of(pixels, "rgba8", SIDE, SIDE));
            try (var reply = client.generate(Generate.messages(turn).maxTokens(1))) {
                reply.done();
            }
        });
    }

    private static double median(int count, DoubleSupplier task) {
        var all = DoubleStream.generate(task).limit(count + count / 10 + 1).skip(count / 10 + 1).sorted().toArray();
        return (all[(count - 1) / 2] + all[count / 2]) / 2;
    }

    private static long residentKb() throws IOException {
        for (var line : Files.readAllLines(Path.of("/proc/self/status"))) {
            if (line.startsWith("VmRSS:")) {
                return Long.parseLong(line.replaceAll("\\D", ""));
            }
        }
        throw new IOException("no VmRSS");
    }
}
