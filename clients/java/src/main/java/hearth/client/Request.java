package hearth.client;

import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Options that {@link Generate} and {@link Tokenize} share. Values are checked by the daemon, which
 * names the field at fault; one that is not set has its default.
 *
 * @param <T> the request itself
 */
public abstract class Request<T extends Request<T>> {
    private final String kind;
    private final Map<String, Object> fields = new LinkedHashMap<>();

    Request(String kind) {
        this.kind = kind;
    }

    /**
     * Sets a field by its name in the protocol, for what a newer daemon offers.
     *
     * @param field the name
     * @param value of text, number, boolean, list or map, with {@link Message}, {@link Image} and the
     *     other types of this package in their places; null takes the field away
     * @return this
     */
    public T set(String field, Object value) {
        if (field.equals("t") || field.equals("id")) {
            throw HearthException.of(ErrorCode.INVALID_VALUE, "the client sets " + field, field);
        }
        if (value == null) {
            fields.remove(field);
        } else {
            fields.put(field, value);
        }
        return self();
    }

    /**
     * Sets the tools that the model may call.
     *
     * @param tools each name once
     * @return this
     */
    public T tools(List<Tool> tools) {
        return set("tools", List.copyOf(tools));
    }

    /**
     * Sets which tools are called.
     *
     * @param choice default {@link Tool.Choice#AUTO}
     * @return this
     */
    public T toolChoice(Tool.Choice choice) {
        return set("tool_choice", choice);
    }

    /**
     * Sets whether a turn may have several calls.
     *
     * @param several default true
     * @return this
     */
    public T parallelToolCalls(boolean several) {
        return set("parallel_tool_calls", several);
    }

    /**
     * Sets variables of the chat template.
     *
     * @param variables by name, as {@code enable_thinking}
     * @return this
     */
    public T template(Map<String, Object> variables) {
        return set("template", variables);
    }

    abstract T self();

    String kind() {
        return kind;
    }

    Map<String, Object> fields() {
        return fields;
    }
}
