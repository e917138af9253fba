package hearth.client;

import java.util.List;
import java.util.Map;

/**
 * One turn of a conversation.
 *
 * @param role whose turn it is
 * @param content texts, images and videos in their order; a turn with calls may have none
 * @param reasoning of the assistant, or empty
 * @param toolCalls of the assistant
 * @param toolCallId the call that a tool's turn is the result of, or empty
 */
public record Message(
        Role role, List<Part> content, String reasoning, List<ToolCall> toolCalls, String toolCallId) {
    /** Whose turn it is. */
    public enum Role {
        /** Who sets the rules. */
        SYSTEM,
        /** Who sets the rules, where a model tells it from the system. */
        DEVELOPER,
        /** Who asks. */
        USER,
        /** The model. */
        ASSISTANT,
        /** The result of a call. */
        TOOL
    }

    /** A piece of a turn: {@link Text}, {@link Image} or {@link Video}. */
    public interface Part {}

    /**
     * Text of a turn.
     *
     * @param text it
     */
    public record Text(String text) implements Part {}

    /**
     * Pictures in their order, and the time of each.
     *
     * @param images all of one size
     * @param times in seconds, as many
     */
    public record Video(List<Image> images, List<Double> times) implements Part {
        /**
         * Checks that each picture has its time.
         *
         * @param images all of one size
         * @param times as many
         */
        public Video {
            images = List.copyOf(images);
            times = List.copyOf(times);
            if (images.size() != times.size()) {
                String text = images.size() + " pictures have " + times.size() + " times";
                throw HearthException.of(ErrorCode.INVALID_VALUE, text, "times");
            }
        }
    }

    /**
     * A call of a tool.
     *
     * @param id names the call in the turn of its result
     * @param name the tool's
     * @param arguments of any JSON
     */
    public record ToolCall(String id, String name, Map<String, Object> arguments) {}

    /**
     * Copies the lists.
     *
     * @param role whose turn it is
     * @param content texts, images and videos
     * @param reasoning of the assistant
     * @param toolCalls of the assistant
     * @param toolCallId of a tool's turn
     */
    public Message {
        content = List.copyOf(content);
        toolCalls = List.copyOf(toolCalls);
    }

    /**
     * A turn that sets the rules.
     *
     * @param text the turn
     * @return it
     */
    public static Message system(String text) {
        return new Message(Role.SYSTEM, List.of(new Text(text)), "", List.of(), "");
    }

    /**
     * A turn of the user.
     *
     * @param text the turn
     * @return it
     */
    public static Message user(String text) {
        return user(new Text(text));
    }

    /**
     * A turn of the user with pictures.
     *
     * @param parts texts, images and videos in their order
     * @return it
     */
    public static Message user(Part... parts) {
        return new Message(Role.USER, List.of(parts), "", List.of(), "");
    }

    /**
     * A turn of the assistant, as an example or from elsewhere; {@link Generation#message} gives that
     * of a reply.
     *
     * @param text the turn
     * @return it
     */
    public static Message assistant(String text) {
        return new Message(Role.ASSISTANT, List.of(new Text(text)), "", List.of(), "");
    }

    /**
     * The result of a call.
     *
     * @param call of the assistant's last turn
     * @param result text, may be empty
     * @return the turn
     */
    public static Message result(ToolCall call, String result) {
        return new Message(Role.TOOL, List.of(new Text(result)), "", List.of(), call.id());
    }
}
