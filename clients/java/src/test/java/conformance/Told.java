package conformance;

import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.RecordComponent;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;

/** Records of answers as the maps that they were: names of the wire, binary as base64. */
public final class Told {
    /** Fields that answers always have; others are left out where they are empty. */
    private static final Set<String> REQUIRED =
            Set.of(
                    "seq text tokens logprob index reason usage prompt_tokens completion_tokens count"
                                    .split(" "));

    private Told() {}

    /**
     * A record's fields by their names on the wire.
     *
     * @param told a record of answers
     * @return the map
     */
    public static Map<String, Object> map(Record told) {
        Map<String, Object> map = new LinkedHashMap<>();
        for (RecordComponent part : told.getClass().getRecordComponents()) {
            String name = part.getName().replaceAll("([A-Z])", "_$1").toLowerCase(Locale.ROOT);
            Object value;
            try {
                part.getAccessor().setAccessible(true);
                value = part.getAccessor().invoke(told);
            } catch (IllegalAccessException | InvocationTargetException cause) {
                throw new IllegalStateException(cause);
            }
            Object plain = plain(value);
            if (REQUIRED.contains(name) || !isEmpty(plain)) {
                map.put(name, plain);
            }
        }
        return map;
    }

    private static Object plain(Object value) {
        if (value instanceof hearth.client.Answers.Alternative one) {
            return List.of(one.token(), one.logprob());
        }
        if (value instanceof hearth.client.Answers.Size size) {
            return List.of(size.width(), size.height());
        }
        if (value instanceof Record record) {
            return map(record);
        }
        if (value instanceof List<?> list) {
            List<Object> items = new ArrayList<>();
            list.forEach(one -> items.add(plain(one)));
            return items;
        }
        if (value instanceof Map<?, ?> map) {
            Map<String, Object> found = new LinkedHashMap<>();
            map.forEach((name, one) -> found.put(name.toString(), plain(one)));
            return found;
        }
        if (value instanceof ByteBuffer buffer) {
            byte[] bytes = new byte[buffer.remaining()];
            buffer.duplicate().get(bytes);
            return Base64.getEncoder().encodeToString(bytes);
        }
        return value;
    }

    private static boolean isEmpty(Object value) {
        return value == null
                || value.equals("")
                || value instanceof Number number && number.doubleValue() == 0
                || value instanceof List<?> list && list.isEmpty()
                || value instanceof Map<?, ?> map && map.isEmpty();
    }
}
