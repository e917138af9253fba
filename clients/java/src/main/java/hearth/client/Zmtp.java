package hearth.client;

import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;

/**
 * ZMTP 3, the wire protocol of ZeroMQ, as a DEALER without keys speaks it: bytes in, messages out.
 * Of each message the first frame is kept; no answer has others.
 */
final class Zmtp {
    // https://rfc.zeromq.org/spec/37/

    private static final byte[] MECHANISM = Arrays.copyOf(ascii("NULL"), 20);
    private static final int GREETING_BYTES = 64;
    private static final int MORE = 1;
    private static final int LONG = 2;
    private static final int COMMAND = 4;
    private static final int MAX_MESSAGE_BYTES = 16 << 20;
    private static final int MAX_FRAMES = 1025;
    private static final int MAX_COMMAND_BYTES = 4096;
    private static final int MAX_UNKNOWN_COMMANDS = 64;

    /** A PING has a time-to-live of two bytes and a context of at most 16. */
    private static final int TTL_BYTES = 2;

    private static final int MAX_CONTEXT_BYTES = 16;

    /** Takes what comes of received bytes. */
    interface Listener {
        /** The handshake is done. */
        void ready();

        /** A message, whole. */
        void message(byte[] data);

        /** Bytes to be sent. */
        void reply(ByteBuffer data);
    }

    private final Listener listener;
    private byte[] head = new byte[GREETING_BYTES];
    private int have;
    private boolean greeted;
    private boolean isReady;
    private int flags;
    private byte[] body;
    private long missing;
    private byte[] first;
    private int frames;
    private long messageBytes;
    private int unknown;

    Zmtp(Listener listener) {
        this.listener = listener;
    }

    /** The bytes that open a connection. */
    static ByteBuffer greeting() {
        ByteBuffer out = ByteBuffer.allocate(GREETING_BYTES);
        out.put((byte) 0xff).putLong(1).put((byte) 0x7f);
        out.put((byte) 3).put((byte) 1).put(MECHANISM);
        return out.rewind();
    }

    /** The command that tells the socket's type. */
    static ByteBuffer ready() {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        property(out, "Socket-Type", ascii("DEALER"));
        return command("READY", out.toByteArray());
    }

    /** The head of a frame of so many bytes. */
    static ByteBuffer head(int size, boolean more) {
        int flag = more ? MORE : 0;
        ByteBuffer out = ByteBuffer.allocate(9);
        if (size <= 0xff) {
            out.put((byte) flag).put((byte) size);
        } else {
            out.put((byte) (flag | LONG)).putLong(size);
        }
        return out.flip();
    }

    /**
     * Takes bytes in, however they are split.
     *
     * @throws HearthException a protocol_violation; nothing more is to be given then
     */
    void receive(ByteBuffer data) {
        while (data.hasRemaining()) {
            if (!greeted) {
                greet(data);
            } else if (body == null && missing == 0) {
                begin(data);
            } else {
                fill(data);
            }
            if (greeted && missing == 0 && body != null) {
                byte[] whole = body;
                body = null;
                end(whole);
            }
        }
    }

    private void greet(ByteBuffer data) {
        have = take(data, have, GREETING_BYTES);
        boolean isOld = have > 9 && (head[9] & 1) == 0 || have > 10 && head[10] < 3;
        if (head[0] != (byte) 0xff || isOld) {
            throw wrong("what listens does not speak ZMTP 3");
        }
        if (have == GREETING_BYTES) {
            if (!Arrays.equals(head, 12, 32, MECHANISM, 0, MECHANISM.length)) {
                throw wrong("what listens asks for keys");
            }
            greeted = true;
            head = new byte[9];
            have = 0;
        }
    }

    private void begin(ByteBuffer data) {
        have = take(data, have, 1);
        flags = head[0];
        boolean moreOfCommand = (flags & (MORE | COMMAND)) == (MORE | COMMAND);
        if ((flags & ~(MORE | LONG | COMMAND)) != 0 || moreOfCommand) {
            throw wrong("a frame has flags that mean nothing");
        }
        int due = (flags & LONG) != 0 ? 9 : 2;
        have = take(data, have, due);
        if (have < due) {
            return;
        }
        have = 0;
        long size = due == 2 ? head[1] & 0xff : ByteBuffer.wrap(head).getLong(1);
        check(size);
        // The frames behind the first are skipped, and take no memory.
        body = new byte[keeps() ? (int) size : 0];
        missing = size;
    }

    /** Refuses a frame before it takes memory. */
    private void check(long size) {
        if ((flags & COMMAND) != 0) {
            if (size < 0 || size > MAX_COMMAND_BYTES) {
                throw wrong("a command is too large");
            }
            return;
        }
        if (!isReady) {
            throw wrong("a message came before READY");
        }
        if (size < 0 || size > MAX_MESSAGE_BYTES - messageBytes) {
            throw wrong("a message is too large");
        }
        messageBytes += size;
        if (++frames > MAX_FRAMES) {
            throw wrong("a message has too many frames");
        }
    }

    private void fill(ByteBuffer data) {
        int part = (int) Math.min(missing, data.remaining());
        if (keeps()) {
            data.get(body, body.length - (int) missing, part);
        } else {
            data.position(data.position() + part);
        }
        missing -= part;
    }

    private boolean keeps() {
        return frames <= 1 || (flags & COMMAND) != 0;
    }

    private void end(byte[] whole) {
        if ((flags & COMMAND) != 0) {
            heed(ByteBuffer.wrap(whole));
            return;
        }
        if (frames == 1) {
            first = whole;
        }
        if ((flags & MORE) == 0) {
            byte[] message = first;
            first = null;
            frames = 0;
            messageBytes = 0;
            listener.message(message);
        }
    }

    private void heed(ByteBuffer command) {
        String name = name(command);
        if (!isReady) {
            handshake(name, command);
        } else if (name.equals("PING")) {
            int context = command.remaining() - TTL_BYTES;
            if (context < 0 || context > MAX_CONTEXT_BYTES) {
                throw wrong("a PING has a wrong size");
            }
            byte[] echo = new byte[context];
            command.position(command.position() + TTL_BYTES).get(echo);
            listener.reply(command("PONG", echo));
        } else if (name.equals("ERROR")) {
            throw wrong("the daemon's socket told of an error");
        } else if (!name.equals("PONG") && ++unknown > MAX_UNKNOWN_COMMANDS) {
            throw wrong("too many commands that mean nothing here");
        }
    }

    private void handshake(String name, ByteBuffer properties) {
        if (name.equals("ERROR")) {
            throw wrong("the daemon's socket refused the connection");
        }
        if (!name.equals("READY")) {
            throw wrong("another command came before READY");
        }
        String type = "";
        while (properties.hasRemaining()) {
            String property = name(properties);
            int size = properties.remaining() < 4 ? -1 : properties.getInt();
            if (size < 0 || size > properties.remaining()) {
                throw wrong("properties cannot be read");
            }
            byte[] value = new byte[size];
            properties.get(value);
            if (property.equalsIgnoreCase("Socket-Type")) {
                type = new String(value, StandardCharsets.US_ASCII);
            }
        }
        if (!type.equals("ROUTER")) {
            throw wrong("what listens is no ROUTER");
        }
        isReady = true;
        listener.ready();
    }

    /** The text behind a byte that tells its length. */
    private static String name(ByteBuffer data) {
        int size = data.hasRemaining() ? data.get() & 0xff : 0;
        if (size == 0 || size > data.remaining()) {
            throw wrong("a command or property has no name");
        }
        byte[] name = new byte[size];
        data.get(name);
        return new String(name, StandardCharsets.US_ASCII);
    }

    /** Moves bytes to the head until it has {@code due}; returns how many it has. */
    private int take(ByteBuffer data, int already, int due) {
        int part = Math.max(0, Math.min(due - already, data.remaining()));
        data.get(head, already, part);
        return already + part;
    }

    private static ByteBuffer command(String name, byte[] rest) {
        int size = 1 + name.length() + rest.length;
        ByteBuffer out = ByteBuffer.allocate(2 + size);
        out.put((byte) COMMAND).put((byte) size);
        return out.put((byte) name.length()).put(ascii(name)).put(rest).flip();
    }

    private static void property(ByteArrayOutputStream out, String name, byte[] value) {
        out.write(name.length());
        out.writeBytes(ascii(name));
        out.writeBytes(ByteBuffer.allocate(4).putInt(value.length).array());
        out.writeBytes(value);
    }

    private static byte[] ascii(String text) {
        return text.getBytes(StandardCharsets.US_ASCII);
    }

    private static HearthException wrong(String text) {
        return HearthException.of(ErrorCode.PROTOCOL_VIOLATION, text);
    }
}
