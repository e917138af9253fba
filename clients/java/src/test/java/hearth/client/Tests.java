package hearth.client;

import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** Tests of the client; the argument is the folder of the vectors. */
final class Tests {
    private Tests() {}

    public static void main(String[] arguments) throws Exception {
        Check check = new Check();
        new Vectors(check, Path.of(arguments[0])).run();
        new Sessions(check).run();
        json(check);
        requests(check);
        check.end();
    }

    private static void json(Check check) {
        String text = "{\"a\": [1, -2.5, 1e3, true, null, \"\\u00e9\\n\\\"\"], \"b\": {}, \"c\": []}";
        check.test("JSON comes out as it went in", () -> {
            Object value = Json.parse(text);
            Check.equal(Json.parse(Json.write(value)), value);
            Check.equal(Json.write(value).contains("\u00e9"), true);
        });
        check.test("whole numbers keep their digits", () -> {
            Check.equal(Json.parse("9223372036854775807"), Long.MAX_VALUE);
            Check.equal(Json.parse("9223372036854775808"), new BigInteger("9223372036854775808"));
        });
        String[] wrong = {
            "", "{", "[1,]", "{\"a\"}", "{a: 1}", "01", "1.", "-", "+1", ".5", "\"\t\"", "\"\\x\"",
            "\"\\u00g0\"", "\"open", "tru", "1 2", "[".repeat(100_000), "9".repeat(2000), "NaN"
        };
        for (String one : wrong) {
            check.test("no JSON: " + one.substring(0, Math.min(9, one.length())), () -> {
                try {
                    throw new AssertionError(Json.parse(one));
                } catch (IllegalArgumentException due) {
                    Check.equal(due.getMessage().startsWith("no JSON"), true);
                }
            });
        }
    }

    private static void requests(Check check) {
        Map<String, Object> endless = new HashMap<>();
        endless.put("self", endless);
        Object[] values = {
            "\ud83d", endless, Double.NaN, Map.of(1, 2), new Object(), BigInteger.ONE.shiftLeft(64)
        };
        for (Object value : values) {
            check.test("no message can hold a " + value.getClass().getSimpleName(), () -> Check.equal(
                    Check.failure(() -> Writer.write("generate", Map.of("template", value))),
                    ErrorCode.INVALID_VALUE));
        }
        check.test("a picture that is used twice is sent once", () -> {
            Image image = Image.of(ByteBuffer.allocate(12), "rgb8", 2, 2);
            Generate request = Generate.messages(Message.user(image, new Message.Text("or"), image));
            Check.equal(Writer.write("generate", request.fields()).pictures().size(), 1);
        });
        check.test("pixels of a wrong size", () -> {
            ByteBuffer pixels = ByteBuffer.allocate(12);
            Check.equal(Check.failure(() -> Image.of(pixels, "rgb8", 3, 2)), ErrorCode.IMAGE_INVALID);
            Check.equal(Check.failure(() -> Image.of(pixels, "rgb8", 2, 2, 5)), ErrorCode.INVALID_VALUE);
            Check.equal(Check.failure(() -> Image.of(pixels, "16UC1", 3, 2)), ErrorCode.INVALID_VALUE);
            Check.equal(Check.failure(() -> Image.of(new byte[3])), ErrorCode.IMAGE_INVALID);
            Image.of(pixels, "rgb8", 1, 2, 6);
            Image.of(pixels, "nv12", 4, 2);
        });
        check.test("a picture from a file", () -> {
            Path file = Files.createTempFile("hearth", ".gif");
            Files.write(file, "GIF89a".getBytes("US-ASCII"));
            Check.equal(Image.of(file).says(), Map.of("format", "gif"));
            Files.delete(file);
        });
        check.test("characters are code points", () -> {
            HearthClient.builder().name("\ud83d\ude42".repeat(128));
            Check.equal(
                    Check.failure(() -> HearthClient.builder().name("\ud83d\ude42".repeat(129))),
                    ErrorCode.INVALID_VALUE);
        });
        for (String address : List.of("tcp://127.0.0.1:7700", "/" + "x".repeat(107), "a\0b")) {
            check.test("no path of a socket: " + address.charAt(0), () -> Check.equal(
                    Check.failure(() -> HearthClient.builder().address(address).build()),
                    ErrorCode.CONNECTION_FAILED));
        }
    }
}
