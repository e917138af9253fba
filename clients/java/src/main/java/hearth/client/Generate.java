package hearth.client;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/** A request for text, from messages or a raw prompt. */
public final class Generate extends Request<Generate> {
    /** Uses of the prefix cache. */
    public enum Cache {
        /** Take from it and leave in it. */
        USE,
        /** Neither. */
        BYPASS,
        /** Keep the prompt there until the session ends. */
        PIN
    }

    private Generate() {
        super("generate");
    }

    /**
     * Asks for the next turn of a conversation.
     *
     * @param turns 1 to 256
     * @return the request
     */
    public static Generate messages(List<Message> turns) {
        return new Generate().set("messages", List.copyOf(turns));
    }

    /**
     * Asks for the next turn of a conversation.
     *
     * @param turns 1 to 256
     * @return the request
     */
    public static Generate messages(Message... turns) {
        return messages(List.of(turns));
    }

    /**
     * Asks for what follows a raw text.
     *
     * @param text not empty
     * @return the request
     */
    public static Generate prompt(String text) {
        return new Generate().set("prompt", text);
    }

    /**
     * Sets what is added to the logits of tokens.
     *
     * @param biases -100 to 100 by token id
     * @return this
     */
    public Generate logitBias(Map<Integer, Double> biases) {
        List<Object> pairs = new ArrayList<>();
        biases.forEach((token, bias) -> pairs.add(List.of(token, bias)));
        return set("logit_bias", pairs);
    }

    /**
     * Sets texts that end the reply before them.
     *
     * @param texts 16 at most
     * @return this
     */
    public Generate stop(String... texts) {
        return set("stop", List.of(texts));
    }

    /**
     * Sets the time after which the daemon ends the request with deadline_exceeded.
     *
     * @param time a day at most
     * @return this
     */
    public Generate deadline(Duration time) {
        return set("deadline_s", time.toNanos() / 1e9);
    }

    /**
     * Sets the use of the prefix cache.
     *
     * @param cache default {@link Cache#USE}
     * @return this
     */
    public Generate cache(Cache cache) {
        return set("cache", cache.name().toLowerCase(Locale.ROOT));
    }

    /**
     * Sets a form that the answer must have.
     *
     * @param format the form
     * @return this
     */
    public Generate responseFormat(ResponseFormat format) {
        return set("response_format", format);
    }

    /**
     * Sets the most tokens of the reply, the end token included.
     *
     * @param value 1 or more; default what fits
     * @return this
     */
    public Generate maxTokens(int value) {
        return set("max_tokens", value);
    }

    /**
     * Sets how freely tokens are drawn.
     *
     * @param value 0, the most likely token always, to 100
     * @return this
     */
    public Generate temperature(double value) {
        return set("temperature", value);
    }

    /**
     * Sets how many of the most likely tokens to choose from.
     *
     * @param value 0 for all
     * @return this
     */
    public Generate topK(int value) {
        return set("top_k", value);
    }

    /**
     * Sets the probability that the tokens to choose from make up.
     *
     * @param value above 0 to 1
     * @return this
     */
    public Generate topP(double value) {
        return set("top_p", value);
    }

    /**
     * Sets the share of the best token's probability that others need.
     *
     * @param value 0 to 1
     * @return this
     */
    public Generate minP(double value) {
        return set("min_p", value);
    }

    /**
     * Sets how much less likely tokens become that were there before.
     *
     * @param value 0.01 to 100; 1 for not at all
     * @return this
     */
    public Generate repetitionPenalty(double value) {
        return set("repetition_penalty", value);
    }

    /**
     * Sets what is taken from the logit of tokens that the reply has.
     *
     * @param value -2 to 2
     * @return this
     */
    public Generate presencePenalty(double value) {
        return set("presence_penalty", value);
    }

    /**
     * Sets what is taken from their logit times how often they came.
     *
     * @param value -2 to 2
     * @return this
     */
    public Generate frequencyPenalty(double value) {
        return set("frequency_penalty", value);
    }

    /**
     * Sets the seed: the same one gives the same text.
     *
     * @param value from 0; default a random one
     * @return this
     */
    public Generate seed(long value) {
        return set("seed", value);
    }

    /**
     * Sets how many likely alternatives of each token are reported.
     *
     * @param value 0 to 20; default no log probabilities
     * @return this
     */
    public Generate logprobs(int value) {
        return set("logprobs", value);
    }

    /**
     * Sets whether to go on after an end token.
     *
     * @param value default false
     * @return this
     */
    public Generate ignoreEos(boolean value) {
        return set("ignore_eos", value);
    }

    /**
     * Sets the priority, higher goes first.
     *
     * @param value -10 to 10
     * @return this
     */
    public Generate priority(int value) {
        return set("priority", value);
    }

    /**
     * Sets whether each delta has its time.
     *
     * @param value default false
     * @return this
     */
    public Generate timestamps(boolean value) {
        return set("timestamps", value);
    }

    /**
     * Sets whether several tokens are tried in a step.
     *
     * @param value default where it is measured to be faster
     * @return this
     */
    public Generate speculation(boolean value) {
        return set("speculation", value);
    }

    /**
     * Sets the adapter that answers.
     *
     * @param value its name
     * @return this
     */
    public Generate adapter(String value) {
        return set("adapter", value);
    }

    /**
     * Sets with whom the prefix cache is shared.
     *
     * @param value those of the same text
     * @return this
     */
    public Generate cacheSalt(String value) {
        return set("cache_salt", value);
    }

    /**
     * Sets the caller's place in a trace.
     *
     * @param value by W3C Trace Context
     * @return this
     */
    public Generate traceparent(String value) {
        return set("traceparent", value);
    }

    /**
     * Sets the most tokens of reasoning.
     *
     * @param value from 0; default the model's choice
     * @return this
     */
    public Generate reasoningBudget(int value) {
        return set("reasoning_budget", value);
    }

    /**
     * Sets how many replies to give.
     *
     * @param value 1 to 8
     * @return this
     */
    public Generate n(int value) {
        return set("n", value);
    }

    @Override
    Generate self() {
        return this;
    }
}
