package hearth.client;

import hearth.client.Answers.Delta;
import java.util.concurrent.Executor;
import java.util.concurrent.Flow;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;

/** A subscriber's side of a generation: one thread of the executor at a time serves it. */
final class Subscription implements Flow.Subscription {
    private final Generation generation;
    private final Flow.Subscriber<? super Delta> subscriber;
    private final Executor executor;
    private final AtomicLong wanted = new AtomicLong();
    private final AtomicInteger wakes = new AtomicInteger();
    private volatile boolean isOver;
    private volatile Throwable refusal;

    Subscription(
            Generation generation, Flow.Subscriber<? super Delta> subscriber, Executor executor) {
        this.generation = generation;
        this.subscriber = subscriber;
        this.executor = executor;
    }

    @Override
    public void request(long count) {
        if (count <= 0) {
            refuse(new IllegalArgumentException("a subscriber requests 1 delta or more"));
            return;
        }
        wanted.accumulateAndGet(count, (had, more) -> had + more < 0 ? Long.MAX_VALUE : had + more);
        wake();
    }

    @Override
    public void cancel() {
        isOver = true;
        generation.cancel();
    }

    void refuse(Throwable why) {
        refusal = why;
        wake();
    }

    /** Looks for what can be given to the subscriber. */
    void wake() {
        if (!isOver && wakes.getAndIncrement() == 0) {
            try {
                executor.execute(this::run);
            } catch (RejectedExecutionException ignored) {
                // Nobody is left who could be served.
                cancel();
            }
        }
    }

    private void run() {
        int seen = wakes.get();
        do {
            try {
                serve();
            } catch (RuntimeException error) {
                // A subscriber must not throw; one that does is served no more.
                cancel();
            } catch (Error error) {
                cancel();
                throw error;
            }
            seen = wakes.addAndGet(-seen);
        } while (seen != 0);
    }

    private void serve() {
        if (!isOver && refusal != null) {
            cancel();
            subscriber.onError(refusal);
        }
        while (!isOver) {
            // The end comes behind the last delta, so it is looked at first.
            boolean hasEnded = generation.completed().isDone();
            Delta delta = wanted.get() > 0 ? generation.poll() : null;
            if (delta != null) {
                wanted.decrementAndGet();
                subscriber.onNext(delta);
            } else if (!hasEnded || generation.hasUnread()) {
                return;
            } else {
                finish();
            }
        }
    }

    private void finish() {
        isOver = true;
        try {
            HearthClient.join(generation.completed());
        } catch (HearthException error) {
            subscriber.onError(error);
            return;
        }
        subscriber.onComplete();
    }
}
