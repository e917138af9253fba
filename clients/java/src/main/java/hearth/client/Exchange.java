package hearth.client;

import hearth.client.Answers.Accepted;
import hearth.client.Answers.Delta;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;

/** One request and its answers so far: filled by the session's thread, read by another. */
final class Exchange {
    /** What deltas may take while nobody reads them, by estimate. */
    private static final long MAX_UNREAD_BYTES = 32 << 20;

    final String id;
    final Writer.Encoded request;
    /** Which answer ends it well. */
    final Class<?> ends;
    final CompletableFuture<Accepted> accepted = new CompletableFuture<>();
    /** Its last answer or its failure; for threads that wait, not for users' callbacks. */
    final CompletableFuture<Object> end = new CompletableFuture<>();

    // Of the session's thread.
    long nextSeq;
    long heardAt;
    boolean cancelled;

    private final ReentrantLock lock = new ReentrantLock();
    private final Condition changed = lock.newCondition();
    private final ArrayDeque<Delta> deltas = new ArrayDeque<>();
    private long unreadBytes;
    private Runnable onChange = () -> {};

    Exchange(String id, Writer.Encoded request, Class<?> ends) {
        this.id = id;
        this.request = request;
        this.ends = ends;
    }

    /** Has {@code task} run, quickly, at each delta and at the end. */
    void onChange(Runnable task) {
        lock.lock();
        try {
            onChange = task;
        } finally {
            lock.unlock();
        }
    }

    /** Keeps a delta for the reader; false where too much waits for it. */
    boolean add(Delta delta) {
        lock.lock();
        try {
            unreadBytes += size(delta);
            if (unreadBytes > MAX_UNREAD_BYTES) {
                return false;
            }
            deltas.add(delta);
            signal();
            return true;
        } finally {
            lock.unlock();
        }
    }

    void done(Object answer) {
        accepted.cancel(false);
        end.complete(answer);
        tell();
    }

    void fail(HearthException error) {
        accepted.completeExceptionally(error);
        end.completeExceptionally(error);
        tell();
    }

    /** A delta that has come, null where none has. */
    Delta poll() {
        lock.lock();
        try {
            Delta delta = deltas.poll();
            unreadBytes -= delta == null ? 0 : size(delta);
            return delta;
        } finally {
            lock.unlock();
        }
    }

    boolean hasUnread() {
        lock.lock();
        try {
            return !deltas.isEmpty();
        } finally {
            lock.unlock();
        }
    }

    /** Waits for a delta or the end; false where neither comes within the time, null for any. */
    boolean await(Duration time) {
        lock.lock();
        try {
            long left = time == null ? 0 : time.toNanos();
            while (deltas.isEmpty() && !end.isDone()) {
                if (time == null) {
                    changed.await(1, TimeUnit.HOURS);
                } else if (left <= 0) {
                    return false;
                } else {
                    left = changed.awaitNanos(left);
                }
            }
            return true;
        } catch (InterruptedException cause) {
            throw interrupted(cause);
        } finally {
            lock.unlock();
        }
    }

    static HearthException interrupted(InterruptedException cause) {
        Thread.currentThread().interrupt();
        String text = "the thread was interrupted while it waited for the daemon";
        return HearthException.of(ErrorCode.INTERRUPTED, text, cause);
    }

    private void tell() {
        lock.lock();
        try {
            signal();
        } finally {
            lock.unlock();
        }
    }

    private void signal() {
        changed.signalAll();
        onChange.run();
    }

    private static long size(Delta delta) {
        long texts = delta.text().length() + delta.reasoning().length();
        for (Answers.CallPiece piece : delta.toolCalls()) {
            texts += 64 + piece.arguments().length() + piece.name().length() + piece.id().length();
        }
        for (Answers.TokenLogprob one : delta.logprobs()) {
            texts += 64 + 32L * (one.top().size() + one.topBytes().size());
        }
        return 128 + 2 * texts + 20L * delta.tokens().size();
    }
}
