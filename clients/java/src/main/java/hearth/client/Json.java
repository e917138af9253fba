package hearth.client;

import java.math.BigInteger;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * JSON, in which arguments and results of tools are written: maps, lists, texts, booleans, null, and
 * numbers as Long, BigInteger or Double.
 */
public final class Json {
    private static final int MAX_DEPTH = 128;

    private final String text;
    private int at;

    private Json(String text) {
        this.text = text;
    }

    /**
     * Reads a JSON text.
     *
     * @param text the whole text
     * @return its value
     * @throws IllegalArgumentException for what is no JSON, or is nested more than 128 deep
     */
    public static Object parse(String text) {
        Json json = new Json(text);
        Object value = json.value(0);
        json.skipSpace();
        if (json.at < text.length()) {
            throw json.wrong();
        }
        return value;
    }

    /**
     * Writes a value as JSON in one line.
     *
     * @param value of the types that {@link #parse} gives, or another Number
     * @return the text
     * @throws IllegalArgumentException for a value of another type, or that is nested too deep
     */
    public static String write(Object value) {
        StringBuilder out = new StringBuilder();
        write(value, out, 0);
        return out.toString();
    }

    private Object value(int depth) {
        skipSpace();
        if (at >= text.length() || depth > MAX_DEPTH) {
            throw wrong();
        }
        return switch (text.charAt(at)) {
            case '{' -> object(depth);
            case '[' -> array(depth);
            case '"' -> string();
            case 't' -> word("true", true);
            case 'f' -> word("false", false);
            case 'n' -> word("null", null);
            default -> number();
        };
    }

    private Map<String, Object> object(int depth) {
        Map<String, Object> found = new LinkedHashMap<>();
        at++;
        if (taken('}')) {
            return found;
        }
        do {
            skipSpace();
            if (at >= text.length() || text.charAt(at) != '"') {
                throw wrong();
            }
            String name = string();
            expect(':');
            found.put(name, value(depth + 1));
        } while (taken(','));
        expect('}');
        return found;
    }

    private List<Object> array(int depth) {
        List<Object> found = new ArrayList<>();
        at++;
        if (taken(']')) {
            return found;
        }
        do {
            found.add(value(depth + 1));
        } while (taken(','));
        expect(']');
        return found;
    }

    private String string() {
        StringBuilder out = new StringBuilder();
        at++;
        while (at < text.length()) {
            char next = text.charAt(at++);
            if (next == '"') {
                return out.toString();
            }
            if (next < ' ') {
                throw wrong();
            }
            out.append(next == '\\' ? escape() : next);
        }
        throw wrong();
    }

    private char escape() {
        char next = at < text.length() ? text.charAt(at++) : 0;
        switch (next) {
            case '"', '\\', '/':
                return next;
            case 'b':
                return '\b';
            case 'f':
                return '\f';
            case 'n':
                return '\n';
            case 'r':
                return '\r';
            case 't':
                return '\t';
            case 'u':
                break;
            default:
                throw wrong();
        }
        int code = 0;
        for (int end = at + 4; at < end; at++) {
            int digit = at < text.length() ? Character.digit(text.charAt(at), 16) : -1;
            if (digit < 0 || text.charAt(at) > 'f') {
                throw wrong();
            }
            code = code * 16 + digit;
        }
        return (char) code;
    }

    private Object word(String word, Object value) {
        if (!text.startsWith(word, at)) {
            throw wrong();
        }
        at += word.length();
        return value;
    }

    private Number number() {
        int start = at;
        if (at < text.length() && text.charAt(at) == '-') {
            at++;
        }
        int whole = digits();
        boolean zeroFirst = text.charAt(at - whole) == '0';
        boolean fraction = at < text.length() && text.charAt(at) == '.';
        if (fraction) {
            at++;
            digits();
        }
        boolean exponent = at < text.length() && (text.charAt(at) | ' ') == 'e';
        if (exponent) {
            at++;
            if (at < text.length() && (text.charAt(at) == '+' || text.charAt(at) == '-')) {
                at++;
            }
            digits();
        }
        if (whole > 1 && zeroFirst) {
            throw wrong();
        }
        String found = text.substring(start, at);
        if (fraction || exponent) {
            return Double.valueOf(found);
        }
        // Long digits would take time by their square.
        if (whole > 1000) {
            throw wrong();
        }
        BigInteger exact = new BigInteger(found);
        return exact.bitLength() < Long.SIZE ? (Number) exact.longValue() : exact;
    }

    private int digits() {
        int start = at;
        while (at < text.length() && text.charAt(at) >= '0' && text.charAt(at) <= '9') {
            at++;
        }
        if (at == start) {
            throw wrong();
        }
        return at - start;
    }

    private boolean taken(char sign) {
        skipSpace();
        if (at < text.length() && text.charAt(at) == sign) {
            at++;
            return true;
        }
        return false;
    }

    private void expect(char sign) {
        if (!taken(sign)) {
            throw wrong();
        }
    }

    private void skipSpace() {
        while (at < text.length() && " \t\r\n".indexOf(text.charAt(at)) >= 0) {
            at++;
        }
    }

    private IllegalArgumentException wrong() {
        return new IllegalArgumentException("no JSON at character " + at);
    }

    private static void write(Object value, StringBuilder out, int depth) {
        if (depth > MAX_DEPTH) {
            throw new IllegalArgumentException("a value is nested too deep for JSON");
        }
        if (value instanceof String string) {
            quote(string, out);
        } else if (value == null || value instanceof Boolean) {
            out.append(value);
        } else if (value instanceof Number number) {
            if (!Double.isFinite(number.doubleValue()) && !(number instanceof BigInteger)) {
                throw new IllegalArgumentException("JSON has no number " + number);
            }
            out.append(number);
        } else if (value instanceof Map<?, ?> map) {
            String before = "{";
            for (Map.Entry<?, ?> entry : map.entrySet()) {
                out.append(before);
                quote((String) entry.getKey(), out);
                write(entry.getValue(), out.append(": "), depth + 1);
                before = ", ";
            }
            out.append(map.isEmpty() ? "{}" : "}");
        } else if (value instanceof List<?> list) {
            String before = "[";
            for (Object item : list) {
                write(item, out.append(before), depth + 1);
                before = ", ";
            }
            out.append(list.isEmpty() ? "[]" : "]");
        } else {
            throw new IllegalArgumentException("JSON has no " + value.getClass().getName());
        }
    }

    private static void quote(String string, StringBuilder out) {
        out.append('"');
        for (int i = 0; i < string.length(); i++) {
            char next = string.charAt(i);
            if (next == '"' || next == '\\') {
                out.append('\\').append(next);
            } else if (next < ' ' || Character.isSurrogate(next)) {
                // Escaped surrogates mean the same, and no lone one is lost.
                out.append(String.format("\\u%04x", (int) next));
            } else {
                out.append(next);
            }
        }
        out.append('"');
    }
}
