package hearth.client;

import hearth.client.Answers.Alternative;
import hearth.client.Answers.TokenLogprob;
import hearth.client.Answers.Usage;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.msgpack.core.MessagePack;
import org.msgpack.core.MessagePackException;
import org.msgpack.core.MessageUnpacker;

/** Bytes of a message to an answer. Sizes are held against what is there before memory is taken. */
final class Reader {
    private static final int MAX_DEPTH = 128;

    /** An answer and the id of its request, empty where it has none. */
    record Arrived(String id, Object answer) {}

    private final MessageUnpacker unpacker;
    private final long size;

    private Reader(byte[] data) {
        unpacker = MessagePack.newDefaultUnpacker(data);
        size = data.length;
    }

    /**
     * The answer that a message is, null for one of a kind that only newer daemons have.
     *
     * @throws HearthException a protocol_violation for what is no answer
     */
    static Arrived read(byte[] data) {
        Fields fields = Fields.of(decode(data));
        Object answer = answer(fields.text("t"), fields);
        return answer == null ? null : new Arrived(fields.textOrEmpty("id"), answer);
    }

    /** The value of a message: maps, lists, texts, longs, doubles, booleans, buffers, null. */
    static Object decode(byte[] data) {
        try {
            Reader reader = new Reader(data);
            Object value = reader.value(0);
            if (reader.left() > 0) {
                throw Fields.wrong("end");
            }
            return value;
        } catch (IOException | MessagePackException cause) {
            String text = "the daemon sent a message that cannot be read";
            throw HearthException.of(ErrorCode.PROTOCOL_VIOLATION, text, cause);
        }
    }

    private Object value(int depth) throws IOException {
        if (depth > MAX_DEPTH) {
            throw Fields.wrong("nesting");
        }
        return switch (unpacker.getNextFormat().getValueType()) {
            case NIL -> {
                unpacker.unpackNil();
                yield null;
            }
            case BOOLEAN -> unpacker.unpackBoolean();
            case INTEGER -> {
                var whole = unpacker.unpackBigInteger();
                yield whole.bitLength() < Long.SIZE ? (Object) whole.longValue() : whole;
            }
            case FLOAT -> unpacker.unpackDouble();
            case STRING -> text(payload(unpacker.unpackRawStringHeader()));
            case BINARY -> ByteBuffer.wrap(payload(unpacker.unpackBinaryHeader())).asReadOnlyBuffer();
            case EXTENSION -> payload(unpacker.unpackExtensionTypeHeader().getLength());
            case ARRAY -> {
                int count = fits(unpacker.unpackArrayHeader(), 1);
                List<Object> items = new ArrayList<>(Math.min(count, 1024));
                for (int i = 0; i < count; i++) {
                    items.add(value(depth + 1));
                }
                yield items;
            }
            case MAP -> {
                int count = fits(unpacker.unpackMapHeader(), 2);
                Map<Object, Object> entries = new HashMap<>();
                for (int i = 0; i < count; i++) {
                    Object key = value(depth + 1);
                    entries.put(key, value(depth + 1));
                }
                yield entries;
            }
        };
    }

    private byte[] payload(int length) throws IOException {
        return unpacker.readPayload(fits(length, 1));
    }

    private int fits(int count, int bytesEach) {
        if ((long) count * bytesEach > left()) {
            throw Fields.wrong("size");
        }
        return count;
    }

    private long left() {
        return size - unpacker.getTotalReadBytes();
    }

    private static String text(byte[] utf8) throws CharacterCodingException {
        return StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(utf8)).toString();
    }

    private static Object answer(String kind, Fields of) {
        return switch (kind) {
            case "welcome" -> new Answers.Welcome(
                    of.whole("proto"),
                    of.text("server"),
                    limits(Fields.of(of.required("limits"))),
                    of.texts("features"),
                    of.textOrEmpty("model"),
                    of.textOrEmpty("epoch"),
                    of.texts("adapters"),
                    of.textOrEmpty("tool_format"));
            case "leased" -> new Answers.Leased(of.number("seconds"));
            case "accepted" -> new Answers.Accepted(
                    of.whole("prompt_tokens"), of.textOrEmpty("request"));
            case "delta" -> delta(of);
            case "done" -> done(of);
            case "error" -> new Answers.Failure(
                    of.text("code"),
                    of.text("message"),
                    of.textOrEmpty("field"),
                    of.numberOrNull("retry_after_s"),
                    of.inner("usage", Reader::usage));
            case "tokens" -> {
                of.required("tokens");
                yield new Answers.Tokens(of.tokens("tokens"));
            }
            case "text" -> new Answers.Text(of.text("text"));
            case "status_report" -> status(of);
            default -> null;
        };
    }

    private static Answers.Limits limits(Fields of) {
        return new Answers.Limits(
                of.whole("frame_bytes"),
                of.whole("frames"),
                of.whole("requests_per_client"),
                of.whole("prompt_tokens"),
                of.whole("total_tokens"),
                of.whole("queued_requests"),
                of.whole("queued_tokens"),
                of.number("lease_s"),
                of.wholeOrZero("images"),
                of.wholeOrZero("image_bytes"),
                of.wholeOrZero("request_image_bytes"),
                of.wholeOrZero("image_tokens"));
    }

    private static Answers.Delta delta(Fields of) {
        return new Answers.Delta(
                of.whole("seq"),
                of.text("text"),
                of.tokens("tokens"),
                of.list("logprobs", one -> logprob(Fields.of(one))),
                of.numberOrNull("ended"),
                of.textOrEmpty("reasoning"),
                of.list("tool_calls", one -> piece(Fields.of(one))),
                Fields.small(of.wholeOrZero("choice"), "choice"));
    }

    private static TokenLogprob logprob(Fields of) {
        return new TokenLogprob(
                of.number("logprob"),
                of.list(
                        "top",
                        one -> {
                            List<?> pair = pair(one, "top");
                            return new Alternative(
                                    Fields.small(pair.get(0), "top"), Fields.number(pair.get(1), "top"));
                        }),
                of.bytesOrEmpty("token_bytes"),
                of.list("top_bytes", one -> Fields.as(ByteBuffer.class, one, "top_bytes")));
    }

    private static List<?> pair(Object value, String name) {
        List<?> pair = Fields.as(List.class, value, name);
        if (pair.size() != 2) {
            throw Fields.wrong(name);
        }
        return pair;
    }

    private static Answers.CallPiece piece(Fields of) {
        return new Answers.CallPiece(
                Fields.small(of.whole("index"), "index"),
                of.textOrEmpty("id"),
                of.textOrEmpty("name"),
                of.textOrEmpty("arguments"));
    }

    private static Usage usage(Fields of) {
        return new Usage(
                of.whole("prompt_tokens"),
                of.whole("completion_tokens"),
                of.wholeOrZero("reasoning_tokens"),
                of.wholeOrZero("cached_tokens"),
                of.numberOrZero("queue_ms"),
                of.numberOrZero("prefill_ms"),
                of.numberOrZero("decode_ms"));
    }

    private static Answers.Done done(Fields of) {
        return new Answers.Done(
                of.text("reason"),
                usage(Fields.of(of.required("usage"))),
                of.inner("images", Reader::images),
                of.inner("speculation", Reader::speculation),
                of.textOrEmpty("stop"),
                of.list("choices", one -> ended(Fields.of(one))));
    }

    private static Answers.ImageUsage images(Fields of) {
        return new Answers.ImageUsage(
                of.whole("count"),
                of.whole("tokens"),
                of.wholeOrZero("cached"),
                of.list(
                        "sizes",
                        one -> {
                            List<?> pair = pair(one, "sizes");
                            return new Answers.Size(
                                    Fields.small(pair.get(0), "sizes"), Fields.small(pair.get(1), "sizes"));
                        }),
                of.numberOrZero("decode_ms"),
                of.numberOrZero("resize_ms"),
                of.numberOrZero("engine_ms"));
    }

    private static Answers.Speculation speculation(Fields of) {
        return new Answers.Speculation(
                of.whole("rounds"),
                of.whole("drafted"),
                of.whole("accepted"),
                of.number("accept_length"));
    }

    private static Answers.Ended ended(Fields of) {
        return new Answers.Ended(
                of.text("reason"), of.whole("completion_tokens"), of.textOrEmpty("stop"));
    }

    private static Answers.StatusReport status(Fields of) {
        Map<String, Object> totals = of.named("totals");
        Map<String, Object> engine = of.named("engine");
        return new Answers.StatusReport(
                of.text("server"),
                of.text("model"),
                of.text("state"),
                of.textOrEmpty("stage"),
                of.numberOrNull("share"),
                of.textOrEmpty("reason"),
                of.number("uptime_s"),
                of.whole("clients"),
                of.whole("running"),
                of.whole("queued"),
                of.whole("queued_tokens"),
                of.wholeOrZero("places"),
                totals == null ? Map.of() : totals,
                engine == null ? Map.of() : engine,
                of.texts("adapters"),
                of.named("executor"));
    }
}
