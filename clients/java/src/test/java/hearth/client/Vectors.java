package hearth.client;

import conformance.Commands;
import conformance.Told;
import java.io.IOException;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;

/** Tests of messages and of the wire protocol by the vectors that all clients share. */
final class Vectors {
    private final Check check;
    private final Path folder;

    Vectors(Check check, Path folder) {
        this.check = check;
        this.folder = folder;
    }

    void run() throws IOException {
        each("requests", this::request);
        each("answers", this::answer);
        each("conversation", this::line);
        each("malformed", vector -> readable(bytes(vector)));
        each("malformed_answers", this::malformed);
        each("zmtp", vector -> zmtp(vector));
        for (String head : List.of("db", "c6", "dd", "df", "c9")) {
            // Of 1.8 GB, which an int can count: the tests have less memory.
            String hex = "81a174" + head + "70000000" + (head.equals("c9") ? "01" : "") + "00";
            check.test("sizes are checked before memory is taken: " + head, () -> Check.equal(
                    Check.failure(() -> Reader.read(bytes(hex))), ErrorCode.PROTOCOL_VIOLATION));
        }
        check.test("hostile bytes are answers, ignored or a violation", this::mutated);
    }

    /** What a test does with a vector. */
    private interface Body {
        void run(Map<?, ?> vector) throws Exception;
    }

    private void each(String file, Body body) throws IOException {
        List<?> all = (List<?>) Json.parse(Files.readString(folder.resolve(file + ".json")));
        Check.equal(all.isEmpty(), false);
        for (Object one : all) {
            Map<?, ?> vector = (Map<?, ?>) one;
            check.test(file + ": " + vector.get("name"), () -> body.run(vector));
        }
    }

    private void request(Map<?, ?> vector) {
        Map<?, ?> message = (Map<?, ?>) vector.get("message");
        Check.equal(Check.plain(Reader.decode(bytes(vector)), false), Check.plain(message, false));
        List<byte[]> frames = new ArrayList<>();
        if (vector.get("frames") instanceof List<?> hex) {
            hex.forEach(one -> frames.add(bytes((String) one)));
        }
        Map<String, Object> fields = new LinkedHashMap<>();
        ((Map<?, ?>) withData(message, frames)).forEach((name, one) -> fields.put((String) name, one));
        String kind = (String) fields.remove("t");
        Object id = fields.remove("id");
        Map<String, Object> written = new LinkedHashMap<>(fields);
        if (kind.equals("generate")) {
            written = new LinkedHashMap<>(Commands.generate(fields).fields());
        } else if (kind.equals("tokenize")) {
            written = new LinkedHashMap<>(Commands.tokenize(fields).fields());
        }
        fields.put("t", kind);
        if (id != null) {
            written.put("id", id);
            fields.put("id", id);
        }
        Writer.Encoded encoded = Writer.write(kind, written);
        List<byte[]> sent = new ArrayList<>();
        encoded.pictures().forEach(one -> sent.add(bytes(one)));
        Object again = withData(Reader.decode(bytes(encoded.message())), sent);
        Check.equal(Check.plain(again, false), Check.plain(fields, false));
    }

    /** A message whose pictures have their data in place of the number of a frame. */
    private static Object withData(Object value, List<byte[]> frames) {
        if (value instanceof List<?> list) {
            return list.stream().map(one -> withData(one, frames)).toList();
        }
        if (!(value instanceof Map<?, ?> map)) {
            return value;
        }
        Map<Object, Object> found = new LinkedHashMap<>();
        map.forEach((name, one) -> found.put(name, withData(one, frames)));
        if (found.remove("frame") instanceof Long frame) {
            found.put("data", Base64.getEncoder().encodeToString(frames.get((int) (frame - 1))));
        }
        return found;
    }

    private void answer(Map<?, ?> vector) {
        Object means = vector.get(vector.containsKey("means") ? "means" : "message");
        Map<Object, Object> due = new LinkedHashMap<>((Map<?, ?>) means);
        due.remove("t");
        Object id = due.remove("id");
        Reader.Arrived arrived = Reader.read(bytes(vector));
        Check.equal(arrived.id(), id == null ? "" : id);
        Map<String, Object> found = Told.map((Record) arrived.answer());
        Check.equal(Check.plain(found, true), Check.plain(due, true));
    }

    private void line(Map<?, ?> vector) {
        Check.equal(
                Check.plain(Reader.decode(bytes(vector)), false),
                Check.plain(vector.get("message"), false));
        if (vector.get("from").equals("server")) {
            Check.equal(Reader.read(bytes(vector)).answer() != null, true);
        }
    }

    private void malformed(Map<?, ?> vector) throws Exception {
        byte[] data = bytes(vector);
        if (vector.get("client").equals("ignores")) {
            Reader.Arrived arrived = Reader.read(data);
            Check.equal(arrived == null || !arrived.id().equals("1"), true);
        } else {
            Check.equal(Check.failure(() -> Reader.read(data)), ErrorCode.PROTOCOL_VIOLATION);
        }
    }

    private static void readable(byte[] data) {
        try {
            Reader.read(data);
        } catch (HearthException error) {
            Check.equal(error.code(), ErrorCode.PROTOCOL_VIOLATION);
        }
    }

    private void mutated() throws IOException {
        Random random = new Random(1);
        for (Object one : (List<?>) Json.parse(Files.readString(folder.resolve("answers.json")))) {
            byte[] data = bytes((Map<?, ?>) one);
            for (int size = 0; size < data.length; size++) {
                readable(Arrays.copyOf(data, size));
            }
            for (int i = 0; i < 2000; i++) {
                byte[] other = data.clone();
                other[random.nextInt(other.length)] = (byte) random.nextInt();
                other[random.nextInt(other.length)] = (byte) random.nextInt();
                readable(other);
            }
        }
    }

    // --- the wire protocol --------------------------------------------------------------------

    /** What came of received bytes. */
    private static final class Seen implements Zmtp.Listener {
        private int readies;
        private final List<String> messages = new ArrayList<>();
        private final List<String> replies = new ArrayList<>();

        @Override
        public void ready() {
            readies++;
        }

        @Override
        public void message(byte[] data) {
            messages.add(hex(data));
        }

        @Override
        public void reply(ByteBuffer data) {
            replies.add(hex(bytes(data)));
        }
    }

    private static final String READY = "041c0552454144590b536f636b65742d5479706500000006524f55544552";

    private void zmtp(Map<?, ?> vector) throws Exception {
        if (vector.get("from").equals("client")) {
            written(vector);
            return;
        }
        for (int part : new int[] {1, 7, 1 << 20}) {
            if (vector.containsKey("close")) {
                Zmtp zmtp = begun((String) vector.get("after"), new Seen());
                ErrorCode code = Check.failure(() -> feed(zmtp, bytes(vector), part));
                Check.equal(code, ErrorCode.PROTOCOL_VIOLATION);
            } else {
                read(vector, part);
            }
        }
    }

    private void read(Map<?, ?> vector, int part) throws Exception {
        Map<?, ?> means = (Map<?, ?>) vector.get("means");
        Object command = means.get("command");
        Seen seen = new Seen();
        String begun = "READY".equals(command) ? "greeting" : "ready";
        String after = means.containsKey("greeting") ? "nothing" : begun;
        Zmtp zmtp = begun(after, seen);
        if ("ERROR".equals(command)) {
            Check.equal(
                    Check.failure(() -> feed(zmtp, bytes(vector), part)), ErrorCode.PROTOCOL_VIOLATION);
            return;
        }
        feed(zmtp, bytes(vector), part);
        if (means.get("message") instanceof List<?> frames) {
            Check.equal(seen.messages, List.of(frames.get(0)));
        } else if ("PING".equals(command)) {
            String context = (String) means.get("context");
            int size = 5 + context.length() / 2;
            Check.equal(seen.replies, List.of(String.format("04%02x04504f4e47%s", size, context)));
        } else {
            // What has no meaning here leaves the connection as it was.
            Check.equal(seen.messages.size() + seen.replies.size(), 0);
            Check.equal(seen.readies, after.equals("nothing") ? 0 : 1);
        }
    }

    private void written(Map<?, ?> vector) {
        Map<?, ?> means = (Map<?, ?>) vector.get("means");
        if (means.containsKey("greeting")) {
            Check.equal(hex(bytes(Zmtp.greeting())), vector.get("hex"));
        } else if ("READY".equals(means.get("command"))) {
            Check.equal(hex(bytes(Zmtp.ready())), vector.get("hex"));
        } else if (means.get("message") instanceof List<?> frames) {
            StringBuilder out = new StringBuilder();
            for (int i = 0; i < frames.size(); i++) {
                String frame = (String) frames.get(i);
                out.append(hex(bytes(Zmtp.head(frame.length() / 2, i + 1 < frames.size())))).append(frame);
            }
            Check.equal(out.toString(), vector.get("hex"));
        }
    }

    private static Zmtp begun(String after, Seen seen) {
        Zmtp zmtp = new Zmtp(seen);
        if (!after.equals("nothing")) {
            zmtp.receive(Zmtp.greeting());
        }
        if (after.equals("ready")) {
            zmtp.receive(ByteBuffer.wrap(bytes(READY)));
        }
        return zmtp;
    }

    private static Object feed(Zmtp zmtp, byte[] data, int part) {
        for (int at = 0; at < data.length; at += part) {
            zmtp.receive(ByteBuffer.wrap(data, at, Math.min(part, data.length - at)));
        }
        return zmtp;
    }

    private static byte[] bytes(Map<?, ?> vector) {
        return bytes((String) vector.get("hex"));
    }

    private static byte[] bytes(String hex) {
        byte[] data = new byte[hex.length() / 2];
        for (int i = 0; i < data.length; i++) {
            data[i] = (byte) Integer.parseInt(hex.substring(2 * i, 2 * i + 2), 16);
        }
        return data;
    }

    private static byte[] bytes(ByteBuffer buffer) {
        byte[] data = new byte[buffer.remaining()];
        buffer.duplicate().get(data);
        return data;
    }

    private static String hex(byte[] data) {
        return data.length == 0 ? "" : String.format("%0" + 2 * data.length + "x", new BigInteger(1, data));
    }
}
