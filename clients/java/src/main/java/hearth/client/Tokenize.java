package hearth.client;

import java.util.List;

/** A request for token ids. */
public final class Tokenize extends Request<Tokenize> {
    private Tokenize() {
        super("tokenize");
    }

    /**
     * Asks for those of a text.
     *
     * @param text raw, may be empty
     * @return the request
     */
    public static Tokenize text(String text) {
        return new Tokenize().set("text", text);
    }

    /**
     * Asks for those of a conversation, with the chat template.
     *
     * @param turns 1 to 256
     * @return the request
     */
    public static Tokenize messages(List<Message> turns) {
        return new Tokenize().set("messages", List.copyOf(turns));
    }

    @Override
    Tokenize self() {
        return this;
    }
}
