package hearth.client;

import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;

/**
 * A picture of a conversation: a file (JPEG, PNG, WebP, GIF) or raw pixels. Its bytes are sent as
 * they are, without a copy: leave them as they are until the request has ended.
 */
public final class Image implements Message.Part {
    private static final int MAX_FILE_BYTES = 64 << 20;

    /** Bytes of a pixel in a row. */
    private static final Map<String, Integer> CHANNELS = new HashMap<>();

    static {
        String[] names = {
            "mono8 8UC1 nv12 bayer_rggb8 bayer_bggr8 bayer_gbrg8 bayer_grbg8",
            "yuv422 uyvy yuv422_yuy2 yuyv",
            "rgb8 bgr8 8UC3",
            "rgba8 bgra8 8UC4"
        };
        for (int i = 0; i < names.length; i++) {
            for (String name : names[i].split(" ")) {
                CHANNELS.put(name, i + 1);
            }
        }
    }

    private final ByteBuffer bytes;
    private final Map<String, Object> says;

    private Image(ByteBuffer bytes, Map<String, Object> says) {
        this.bytes = bytes.slice().asReadOnlyBuffer();
        this.says = says;
    }

    /**
     * A picture from a file, which is read now.
     *
     * @param path of at most 64 MiB
     * @return the picture
     * @throws IOException where it cannot be read
     * @throws HearthException image_invalid for another kind of file, image_too_large
     */
    public static Image of(Path path) throws IOException {
        try (InputStream in = Files.newInputStream(path)) {
            byte[] bytes = in.readNBytes(MAX_FILE_BYTES + 1);
            if (bytes.length > MAX_FILE_BYTES) {
                throw HearthException.of(ErrorCode.IMAGE_TOO_LARGE, path + " has more than 64 MiB");
            }
            return of(bytes);
        }
    }

    /**
     * A picture from the bytes of a file.
     *
     * @param file the whole file
     * @return the picture
     * @throws HearthException image_invalid for another kind of file
     */
    public static Image of(byte[] file) {
        String head = new String(file, 0, Math.min(12, file.length), StandardCharsets.ISO_8859_1);
        String format;
        if (head.startsWith("\u00ff\u00d8")) {
            format = "jpeg";
        } else if (head.startsWith("\u0089PNG")) {
            format = "png";
        } else if (head.startsWith("RIFF") && head.endsWith("WEBP")) {
            format = "webp";
        } else if (head.startsWith("GIF8")) {
            format = "gif";
        } else {
            String text = "this is no JPEG, PNG, WebP or GIF file: raw pixels need their encoding";
            throw HearthException.of(ErrorCode.IMAGE_INVALID, text);
        }
        return of(file, format);
    }

    /**
     * A picture from the bytes of a file of a known format.
     *
     * @param file the whole file
     * @param format {@code jpeg}, {@code png}, {@code webp} or {@code gif}
     * @return the picture
     */
    public static Image of(byte[] file, String format) {
        return new Image(ByteBuffer.wrap(file), Map.of("format", format));
    }

    /**
     * Raw pixels without bytes between rows.
     *
     * @param pixels of 8 bits a value
     * @param encoding their layout by ROS's name for it, as {@code rgb8}
     * @param width in pixels
     * @param height in pixels
     * @return the picture
     * @throws HearthException invalid_value, or image_invalid where sizes do not fit
     */
    public static Image of(ByteBuffer pixels, String encoding, int width, int height) {
        return of(pixels, encoding, width, height, 0);
    }

    /**
     * Raw pixels.
     *
     * @param pixels of 8 bits a value
     * @param encoding their layout by ROS's name for it, as {@code rgb8}
     * @param width in pixels
     * @param height in pixels
     * @param step bytes from one row to the next, 0 where none lie between them
     * @return the picture
     * @throws HearthException invalid_value, or image_invalid where sizes do not fit
     */
    public static Image of(ByteBuffer pixels, String encoding, int width, int height, int step) {
        Integer channels = CHANNELS.get(encoding);
        if (channels == null) {
            String text = "there is no encoding " + encoding + " of 8 bits: it is one of ";
            throw HearthException.of(
                    ErrorCode.INVALID_VALUE, text + String.join(", ", CHANNELS.keySet()), "encoding");
        }
        if (width < 1 || height < 1) {
            throw HearthException.of(
                    ErrorCode.INVALID_VALUE, "width and height are from 1", width < 1 ? "width" : "height");
        }
        long row = (long) width * channels;
        long rows = encoding.equals("nv12") ? height + height / 2L : height;
        if (step != 0 && step < row) {
            String text = "step is " + step + ": a row has " + row + " bytes";
            throw HearthException.of(ErrorCode.INVALID_VALUE, text, "step");
        }
        long due = rows * (step == 0 ? row : step);
        if (due != pixels.remaining()) {
            String text = "these are " + pixels.remaining() + " bytes, where " + due + " are due";
            throw HearthException.of(ErrorCode.IMAGE_INVALID, text, step == 0 ? "height" : "step");
        }
        Map<String, Object> says = new LinkedHashMap<>();
        says.put("encoding", encoding);
        says.put("width", width);
        says.put("height", height);
        if (step != 0) {
            says.put("step", step);
        }
        return new Image(pixels, says);
    }

    ByteBuffer bytes() {
        return bytes.duplicate();
    }

    /** What its part says of it, but for the frame. */
    Map<String, Object> says() {
        return says;
    }
}
