package hearth.client;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.function.Function;

/** Fields of a map that came, by name; what has a wrong type or is missing is a violation. */
record Fields(Map<?, ?> map) {
    static Fields of(Object value) {
        return new Fields(as(Map.class, value, "a map"));
    }

    String text(String name) {
        return as(String.class, required(name), name);
    }

    String textOrEmpty(String name) {
        Object value = map.get(name);
        return value == null ? "" : as(String.class, value, name);
    }

    long whole(String name) {
        return as(Long.class, required(name), name);
    }

    long wholeOrZero(String name) {
        Object value = map.get(name);
        return value == null ? 0 : as(Long.class, value, name);
    }

    double number(String name) {
        return number(required(name), name);
    }

    double numberOrZero(String name) {
        Object value = map.get(name);
        return value == null ? 0 : number(value, name);
    }

    Double numberOrNull(String name) {
        Object value = map.get(name);
        return value == null ? null : (Double) number(value, name);
    }

    ByteBuffer bytesOrEmpty(String name) {
        Object value = map.get(name);
        return value == null ? ByteBuffer.allocate(0) : as(ByteBuffer.class, value, name);
    }

    /** The items of a list, none where it is left out. */
    <T> List<T> list(String name, Function<Object, T> item) {
        Object value = map.get(name);
        if (value == null) {
            return List.of();
        }
        List<T> items = new ArrayList<>();
        for (Object one : as(List.class, value, name)) {
            items.add(item.apply(one));
        }
        return Collections.unmodifiableList(items);
    }

    List<String> texts(String name) {
        return list(name, one -> as(String.class, one, name));
    }

    /** Token ids; null where the list is left out. */
    List<Integer> tokens(String name) {
        return list(name, one -> small(one, name));
    }

    /** A map that comes within this one, null where it is left out. */
    <T> T inner(String name, Function<Fields, T> build) {
        Object value = map.get(name);
        return value == null ? null : build.apply(of(value));
    }

    /** A map of text to anything, as it is; null where it is left out. */
    Map<String, Object> named(String name) {
        Object value = map.get(name);
        if (value == null) {
            return null;
        }
        Map<?, ?> found = as(Map.class, value, name);
        for (Object key : found.keySet()) {
            as(String.class, key, name);
        }
        @SuppressWarnings("unchecked") // All keys were looked at.
        Map<String, Object> named = (Map<String, Object>) found;
        return Collections.unmodifiableMap(named);
    }

    Object required(String name) {
        Object value = map.get(name);
        if (value == null) {
            throw wrong(name);
        }
        return value;
    }

    static int small(Object value, String name) {
        long whole = as(Long.class, value, name);
        if (whole != (int) whole) {
            throw wrong(name);
        }
        return (int) whole;
    }

    static double number(Object value, String name) {
        return as(Number.class, value, name).doubleValue();
    }

    static <T> T as(Class<T> type, Object value, String name) {
        if (!type.isInstance(value)) {
            throw wrong(name);
        }
        return type.cast(value);
    }

    static HearthException wrong(String name) {
        String text = "the daemon sent a message whose " + name + " cannot be read";
        return HearthException.of(ErrorCode.PROTOCOL_VIOLATION, text, name);
    }
}
