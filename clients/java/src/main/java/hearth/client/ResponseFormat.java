package hearth.client;

import java.util.Map;

/** A form that the answer must have. */
public final class ResponseFormat {
    private final Map<String, Object> fields;

    private ResponseFormat(Map<String, Object> fields) {
        this.fields = fields;
    }

    /** {@return any JSON object} */
    public static ResponseFormat jsonObject() {
        return new ResponseFormat(Map.of("type", "json_object"));
    }

    /**
     * JSON that a schema allows.
     *
     * @param schema the JSON schema
     * @return the form
     */
    public static ResponseFormat jsonSchema(Map<String, Object> schema) {
        return new ResponseFormat(Map.of("type", "json_schema", "schema", schema));
    }

    /**
     * Text that all of a regular expression matches.
     *
     * @param regex the expression
     * @return the form
     */
    public static ResponseFormat regex(String regex) {
        return new ResponseFormat(Map.of("type", "regex", "regex", regex));
    }

    /**
     * Text of a grammar.
     *
     * @param grammar in the notation of Lark
     * @return the form
     */
    public static ResponseFormat lark(String grammar) {
        return new ResponseFormat(Map.of("type", "lark", "grammar", grammar));
    }

    Map<String, Object> fields() {
        return fields;
    }
}
