package hearth.client;

import java.util.Map;

/**
 * A tool that the model may call.
 *
 * @param name letters, digits and signs of {@code _ . : / -}
 * @param description what it does
 * @param parameters a JSON schema of its arguments
 * @param strict whether arguments follow the schema also where the model chooses to call
 */
public record Tool(String name, String description, Map<String, Object> parameters, boolean strict) {
    /**
     * A tool that is not strict.
     *
     * @param name letters, digits and signs of {@code _ . : / -}
     * @param description what it does
     * @param parameters a JSON schema of its arguments
     */
    public Tool(String name, String description, Map<String, Object> parameters) {
        this(name, description, parameters, false);
    }

    /** Which tools the model calls. */
    public static final class Choice {
        /** The model chooses. */
        public static final Choice AUTO = new Choice("auto");

        /** No call. */
        public static final Choice NONE = new Choice("none");

        /** One call at least. */
        public static final Choice REQUIRED = new Choice("required");

        private final Object value;

        private Choice(Object value) {
            this.value = value;
        }

        /**
         * Exactly one call, of this tool.
         *
         * @param name the tool's
         * @return the choice
         */
        public static Choice of(String name) {
            return new Choice(Map.of("name", name));
        }

        Object value() {
            return value;
        }
    }
}
