package hearth.client;

import java.io.IOException;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.CharBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.IdentityHashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import org.msgpack.core.MessageBufferPacker;
import org.msgpack.core.MessagePack;

/** A request to the bytes of its message, and the frames of its pictures. */
final class Writer {
    /** The daemon refuses values 64 deep; this bound is for those that have no end. */
    private static final int MAX_DEPTH = 128;

    /** A message and the pictures behind it. */
    record Encoded(ByteBuffer message, List<ByteBuffer> pictures) {}

    private final MessageBufferPacker packer = MessagePack.newDefaultBufferPacker();
    private final Map<Image, Integer> numbers = new IdentityHashMap<>();
    private final List<ByteBuffer> pictures = new ArrayList<>();
    private String field = "";

    private Writer() {}

    /**
     * The message with type {@code kind}.
     *
     * @throws HearthException invalid_value for what no message can hold
     */
    static Encoded write(String kind, Map<String, ?> fields) {
        Writer writer = new Writer();
        try {
            writer.packer.packMapHeader(fields.size() + 1);
            writer.text("t");
            writer.text(kind);
            for (Map.Entry<String, ?> entry : fields.entrySet()) {
                writer.field = entry.getKey();
                writer.text(entry.getKey());
                writer.value(entry.getValue(), 1);
            }
            return new Encoded(ByteBuffer.wrap(writer.packer.toByteArray()), writer.pictures);
        } catch (CharacterCodingException cause) {
            throw writer.wrong("text that is no Unicode");
        } catch (IOException cause) {
            throw writer.wrong("a value that cannot be encoded");
        }
    }

    private void value(Object value, int depth) throws IOException {
        if (depth > MAX_DEPTH) {
            throw wrong("a value that is nested too deep");
        }
        if (value instanceof String text) {
            text(text);
        } else if (value instanceof Boolean truth) {
            packer.packBoolean(truth);
        } else if (value instanceof Number number) {
            number(number);
        } else if (value instanceof Map<?, ?> map) {
            packer.packMapHeader(map.size());
            for (Map.Entry<?, ?> entry : map.entrySet()) {
                if (!(entry.getKey() instanceof String name)) {
                    throw wrong("a map whose keys are no text");
                }
                text(name);
                value(entry.getValue(), depth + 1);
            }
        } else if (value instanceof List<?> list) {
            packer.packArrayHeader(list.size());
            for (Object item : list) {
                value(item, depth + 1);
            }
        } else if (value == null) {
            packer.packNil();
        } else {
            value(plain(value), depth + 1);
        }
    }

    private void text(String text) throws IOException {
        ByteBuffer utf8 = StandardCharsets.UTF_8.newEncoder().encode(CharBuffer.wrap(text));
        packer.packRawStringHeader(utf8.remaining());
        packer.writePayload(utf8.array(), utf8.position(), utf8.remaining());
    }

    private void number(Number number) throws IOException {
        if (number instanceof Double || number instanceof Float) {
            if (!Double.isFinite(number.doubleValue())) {
                throw wrong("a number that is not finite");
            }
            packer.packDouble(number.doubleValue());
        } else if (number instanceof BigInteger big) {
            if (big.bitLength() > Long.SIZE || (big.signum() < 0 && big.bitLength() >= Long.SIZE)) {
                throw wrong("a number of more than 64 bits");
            }
            packer.packBigInteger(big);
        } else {
            packer.packLong(number.longValue());
        }
    }

    /** A value of this package's types as maps and lists. */
    private Object plain(Object value) {
        Map<String, Object> map = new LinkedHashMap<>();
        if (value instanceof Message turn) {
            map.put("role", turn.role().name().toLowerCase(Locale.ROOT));
            if (turn.content().size() == 1 && turn.content().get(0) instanceof Message.Text only) {
                map.put("content", only.text());
            } else if (!turn.content().isEmpty()) {
                map.put("content", turn.content());
            }
            putUnlessEmpty(map, "reasoning", turn.reasoning());
            if (!turn.toolCalls().isEmpty()) {
                map.put("tool_calls", turn.toolCalls());
            }
            putUnlessEmpty(map, "tool_call_id", turn.toolCallId());
        } else if (value instanceof Message.Text part) {
            map.put("type", "text");
            map.put("text", part.text());
        } else if (value instanceof Image image) {
            map.put("type", "image");
            map.putAll(picture(image));
        } else if (value instanceof Message.Video video) {
            List<Object> frames = new ArrayList<>();
            for (int i = 0; i < video.images().size(); i++) {
                Map<String, Object> frame = picture(video.images().get(i));
                frame.put("time_s", video.times().get(i));
                frames.add(frame);
            }
            map.put("type", "video");
            map.put("frames", frames);
        } else if (value instanceof Message.ToolCall call) {
            map.put("id", call.id());
            map.put("name", call.name());
            map.put("arguments", call.arguments());
        } else if (value instanceof Tool tool) {
            map.put("name", tool.name());
            map.put("description", tool.description());
            map.put("parameters", tool.parameters());
            if (tool.strict()) {
                map.put("strict", true);
            }
        } else if (value instanceof Tool.Choice choice) {
            return choice.value();
        } else if (value instanceof ResponseFormat format) {
            return format.fields();
        } else {
            throw wrong("a value of " + value.getClass().getName());
        }
        return map;
    }

    /** What a part says of a picture, whose bytes lie in the frame of that number. */
    private Map<String, Object> picture(Image image) {
        Integer number = numbers.get(image);
        if (number == null) {
            pictures.add(image.bytes());
            number = pictures.size();
            numbers.put(image, number);
        }
        Map<String, Object> says = new LinkedHashMap<>(image.says());
        says.put("frame", number);
        return says;
    }

    private static void putUnlessEmpty(Map<String, Object> map, String name, String text) {
        if (!text.isEmpty()) {
            map.put(name, text);
        }
    }

    private HearthException wrong(String what) {
        return HearthException.of(ErrorCode.INVALID_VALUE, field + " holds " + what, field);
    }
}
