package hearth.client;

import java.io.DataInputStream;
import java.io.IOException;
import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.Channels;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** A daemon that says what a test tells it to. */
final class FakeDaemon implements AutoCloseable {
    static final Map<String, Object> LIMITS = new LinkedHashMap<>();

    static {
        String names = "frame_bytes frames requests_per_client prompt_tokens total_tokens queued_requests";
        for (String name : (names + " queued_tokens images image_bytes request_image_bytes").split(" ")) {
            LIMITS.put(name, 64 << 20);
        }
        LIMITS.put("lease_s", 30);
    }

    private final Path folder = Files.createTempDirectory("hearth");
    private final ServerSocketChannel server = ServerSocketChannel.open(StandardProtocolFamily.UNIX);
    private SocketChannel channel;
    private DataInputStream in;

    FakeDaemon() throws IOException {
        server.bind(UnixDomainSocketAddress.of(path()));
    }

    Path path() {
        return folder.resolve("s");
    }

    HearthClient.Builder builder() {
        return HearthClient.builder().address("ipc://" + path());
    }

    /** Waits for a client and shakes hands; returns its hello. */
    Map<?, ?> accept() throws IOException {
        channel = server.accept();
        in = new DataInputStream(Channels.newInputStream(channel));
        channel.write(Zmtp.greeting());
        in.readFully(new byte[Zmtp.greeting().remaining()]);
        frame();
        byte[] ready = {
            4, 28, 5, 'R', 'E', 'A', 'D', 'Y', 11, 'S', 'o', 'c', 'k', 'e', 't', '-', 'T', 'y', 'p', 'e',
            0, 0, 0, 6, 'R', 'O', 'U', 'T', 'E', 'R'
        };
        write(ByteBuffer.wrap(ready));
        return (Map<?, ?>) Reader.decode(frame());
    }

    /** Accepts a client and welcomes it. */
    void welcome() throws IOException {
        accept();
        say("welcome", greeting(1, 30));
    }

    /** The fields of a welcome. */
    Map<String, ?> greeting(int proto, double lease) {
        Map<String, Object> limits = new LinkedHashMap<>(LIMITS);
        limits.put("lease_s", lease);
        return Map.of("proto", proto, "server", "fake", "limits", limits, "epoch", "1");
    }

    /** The next message but leases, of one frame. */
    Map<?, ?> take(String kind) throws IOException {
        Map<?, ?> message;
        do {
            message = (Map<?, ?>) Reader.decode(frame());
        } while (message.get("t").equals("lease"));
        Check.equal(message.get("t"), kind);
        return message;
    }

    /** Starts a generation of the client; returns its id. */
    String start() throws IOException {
        String id = (String) take("generate").get("id");
        say("accepted", Map.of("id", id, "prompt_tokens", 3));
        return id;
    }

    void delta(String id, int seq, String text) throws IOException {
        say("delta", Map.of("id", id, "seq", seq, "text", text, "tokens", List.of(seq)));
    }

    void done(String id, String reason) throws IOException {
        Map<String, Object> usage = Map.of("prompt_tokens", 3, "completion_tokens", 1);
        say("done", Map.of("id", id, "reason", reason, "usage", usage));
    }

    void say(String kind, Map<String, ?> fields) throws IOException {
        ByteBuffer message = Writer.write(kind, fields).message();
        write(Zmtp.head(message.remaining(), false));
        write(message);
    }

    void write(ByteBuffer data) throws IOException {
        while (data.hasRemaining()) {
            channel.write(data);
        }
    }

    /** The body of the next frame. */
    byte[] frame() throws IOException {
        int flags = in.readUnsignedByte();
        byte[] body = new byte[(flags & 2) == 0 ? in.readUnsignedByte() : (int) in.readLong()];
        in.readFully(body);
        return body;
    }

    void hangUp() throws IOException {
        channel.close();
    }

    @Override
    public void close() throws IOException {
        if (channel != null) {
            channel.close();
        }
        server.close();
        Files.deleteIfExists(path());
        Files.delete(folder);
    }
}
