package hearth.client;

import java.nio.ByteBuffer;
import java.util.List;
import java.util.Map;

/** Answers of the daemon. Fields that it left out are empty, 0 or null, as each record says. */
public final class Answers {
    private Answers() {}

    /**
     * What the daemon said when the session began.
     *
     * @param proto the protocol that is spoken
     * @param server name and version
     * @param limits bounds of this session
     * @param features what the daemon offers beyond the first version
     * @param model the model's name
     * @param epoch names this run of the daemon
     * @param adapters names that a request may give as its adapter
     * @param toolFormat the form in which the model calls tools, empty without a chat template
     */
    public record Welcome(
            long proto,
            String server,
            Limits limits,
            List<String> features,
            String model,
            String epoch,
            List<String> adapters,
            String toolFormat) {}

    /**
     * Bounds of a session: sizes in bytes, lengths in tokens. Those of pictures are 0 where the
     * model sees none.
     *
     * @param frameBytes of a message without its pictures
     * @param frames of one message, with its pictures
     * @param requestsPerClient requests open at once
     * @param promptTokens of one prompt
     * @param totalTokens of a prompt and its reply
     * @param queuedRequests waiting, of all clients
     * @param queuedTokens waiting, of all clients
     * @param leaseS the lease in seconds
     * @param images pictures of one request
     * @param imageBytes of one picture
     * @param requestImageBytes of all pictures of one request
     * @param imageTokens of one picture
     */
    public record Limits(
            long frameBytes,
            long frames,
            long requestsPerClient,
            long promptTokens,
            long totalTokens,
            long queuedRequests,
            long queuedTokens,
            double leaseS,
            long images,
            long imageBytes,
            long requestImageBytes,
            long imageTokens) {}

    /**
     * The request is in the queue.
     *
     * @param promptTokens the prompt's length
     * @param request the request's id in the daemon's logs and traces, or empty
     */
    public record Accepted(long promptTokens, String request) {}

    /**
     * More of a reply.
     *
     * @param seq counts from 0
     * @param text may be empty
     * @param tokens those generated since the last delta
     * @param logprobs of each token, where they were asked for
     * @param ended when the last token's step ended, in seconds of the monotonic clock, or null
     * @param reasoning more of the model's reasoning
     * @param toolCalls more of its calls
     * @param choice which of several replies this is of
     */
    public record Delta(
            long seq,
            String text,
            List<Integer> tokens,
            List<TokenLogprob> logprobs,
            Double ended,
            String reasoning,
            List<CallPiece> toolCalls,
            int choice) {}

    /**
     * A token's log probability and the most likely alternatives.
     *
     * @param logprob its natural logarithm
     * @param top the alternatives
     * @param tokenBytes the token's bytes, which need not be whole characters
     * @param topBytes those of the alternatives
     */
    public record TokenLogprob(
            double logprob, List<Alternative> top, ByteBuffer tokenBytes, List<ByteBuffer> topBytes) {}

    /**
     * A token that might have come.
     *
     * @param token its id
     * @param logprob its log probability
     */
    public record Alternative(int token, double logprob) {}

    /**
     * More of a call: the first piece has id and name, the arguments of all pieces joined are JSON.
     *
     * @param index counts the calls of a reply from 0
     * @param id the call's id, or empty
     * @param name the tool's name, or empty
     * @param arguments more of the JSON text
     */
    public record CallPiece(int index, String id, String name, String arguments) {}

    /**
     * What a generation took: counts in tokens, times in milliseconds.
     *
     * @param promptTokens of the prompt
     * @param completionTokens of the reply, reasoning and calls too
     * @param reasoningTokens of the reply, that are reasoning
     * @param cachedTokens of the prompt, from the prefix cache
     * @param queueMs until it got a place
     * @param prefillMs from there to the first token
     * @param decodeMs from there to the last
     */
    public record Usage(
            long promptTokens,
            long completionTokens,
            long reasoningTokens,
            long cachedTokens,
            double queueMs,
            double prefillMs,
            double decodeMs) {}

    /**
     * The end of a generation.
     *
     * @param reason {@code stop}, {@code length}, {@code cancelled}, {@code tool_calls}, or one of a
     *     newer daemon
     * @param usage what it took
     * @param images about its pictures, or null
     * @param speculation about its rounds of speculation, or null
     * @param stop the stop string that ended it, or empty
     * @param choices the end of each reply, where there were several
     */
    public record Done(
            String reason,
            Usage usage,
            ImageUsage images,
            Speculation speculation,
            String stop,
            List<Ended> choices) {}

    /**
     * What the pictures of a request took.
     *
     * @param count images and videos
     * @param tokens of the prompt, that they are
     * @param cached how many were known from before
     * @param sizes width and height in pixels of each as the model saw it
     * @param decodeMs to decode the others
     * @param resizeMs to scale them
     * @param engineMs to encode them
     */
    public record ImageUsage(
            long count,
            long tokens,
            long cached,
            List<Size> sizes,
            double decodeMs,
            double resizeMs,
            double engineMs) {}

    /**
     * A picture's size in pixels.
     *
     * @param width of a row
     * @param height in rows
     */
    public record Size(int width, int height) {}

    /**
     * A reply's rounds of speculation.
     *
     * @param rounds how many
     * @param drafted tokens proposed
     * @param accepted tokens that came from rounds
     * @param acceptLength tokens a round
     */
    public record Speculation(long rounds, long drafted, long accepted, double acceptLength) {}

    /**
     * The end of one of several replies.
     *
     * @param reason as of {@link Done}
     * @param completionTokens of this reply
     * @param stop the stop string that ended it, or empty
     */
    public record Ended(String reason, long completionTokens, String stop) {}

    /**
     * What the daemon serves and does.
     *
     * @param server name and version
     * @param model the model's name
     * @param state {@code starting}, {@code loading}, {@code ready}, {@code draining} or {@code
     *     failed}, or one of a newer daemon
     * @param stage of the loading, or empty
     * @param share how much of the stage is done, 0 to 1, or null
     * @param reason of a failure, or empty
     * @param uptimeS seconds since the start
     * @param clients sessions now
     * @param running generations that run
     * @param queued generations that wait
     * @param queuedTokens their prompt tokens
     * @param places how many can run together
     * @param totals counters since the start
     * @param engine facts about the engine
     * @param adapters those that requests may ask for
     * @param executor figures of the engine's process by their names in PROTOCOL.md, or null
     */
    public record StatusReport(
            String server,
            String model,
            String state,
            String stage,
            Double share,
            String reason,
            double uptimeS,
            long clients,
            long running,
            long queued,
            long queuedTokens,
            long places,
            Map<String, Object> totals,
            Map<String, Object> engine,
            List<String> adapters,
            Map<String, Object> executor) {}

    record Leased(double seconds) {}

    record Tokens(List<Integer> tokens) {}

    record Text(String text) {}

    record Failure(String code, String message, String field, Double retryAfterS, Usage usage) {}
}
