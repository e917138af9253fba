package conformance;

import hearth.client.Generate;
import hearth.client.Image;
import hearth.client.Message;
import hearth.client.Request;
import hearth.client.Tokenize;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Requests of commands, whose fields have their names of the wire. */
public final class Commands {
    private Commands() {}

    /**
     * A generation.
     *
     * @param fields those of the request
     * @return the request
     */
    public static Generate generate(Map<?, ?> fields) {
        Object prompt = fields.get("prompt");
        Generate request =
                prompt instanceof String text ? Generate.prompt(text) : Generate.messages(List.of());
        return filled(request, fields);
    }

    /**
     * A request for token ids.
     *
     * @param fields those of the request
     * @return the request
     */
    public static Tokenize tokenize(Map<?, ?> fields) {
        Object text = fields.get("text");
        Tokenize request =
                text instanceof String given ? Tokenize.text(given) : Tokenize.messages(List.of());
        return filled(request, fields);
    }

    private static <T extends Request<T>> T filled(T request, Map<?, ?> fields) {
        request.set("messages", null);
        for (Map.Entry<?, ?> field : fields.entrySet()) {
            request.set((String) field.getKey(), withPictures(field.getValue()));
        }
        return request;
    }

    /** A value whose maps with data are pictures. */
    private static Object withPictures(Object value) {
        if (value instanceof List<?> list) {
            List<Object> items = new ArrayList<>();
            list.forEach(one -> items.add(withPictures(one)));
            return items;
        }
        if (!(value instanceof Map<?, ?> map)) {
            return value;
        }
        if ("image".equals(map.get("type")) && map.containsKey("data")) {
            return image(map);
        }
        if ("video".equals(map.get("type")) && map.get("frames") instanceof List<?> frames) {
            List<Image> images = new ArrayList<>();
            List<Double> times = new ArrayList<>();
            for (Object frame : frames) {
                images.add(image((Map<?, ?>) frame));
                times.add(((Number) ((Map<?, ?>) frame).get("time_s")).doubleValue());
            }
            return new Message.Video(images, times);
        }
        Map<Object, Object> found = new LinkedHashMap<>();
        map.forEach((name, one) -> found.put(name, withPictures(one)));
        return found;
    }

    private static Image image(Map<?, ?> told) {
        byte[] data = Base64.getDecoder().decode((String) told.get("data"));
        if (told.get("encoding") instanceof String encoding) {
            return Image.of(
                    ByteBuffer.wrap(data),
                    encoding,
                    whole(told, "width"),
                    whole(told, "height"),
                    whole(told, "step"));
        }
        return told.get("format") instanceof String format ? Image.of(data, format) : Image.of(data);
    }

    private static int whole(Map<?, ?> told, String name) {
        return told.get(name) instanceof Number number ? number.intValue() : 0;
    }
}
