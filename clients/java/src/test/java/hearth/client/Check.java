package hearth.client;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** A runner of tests and what they say. */
final class Check {
    private static final long PATIENCE_S = 60;

    /** What a test does. */
    interface Body {
        void run() throws Exception;
    }

    private final List<String> failed = new ArrayList<>();
    private int count;

    /** Runs a test in a thread of its own, for a minute at most. */
    void test(String name, Body body) {
        CompletableFuture<Void> ended = new CompletableFuture<>();
        Thread thread =
                new Thread(
                        () -> {
                            try {
                                body.run();
                                ended.complete(null);
                            } catch (Throwable error) {
                                ended.completeExceptionally(error);
                            }
                        });
        thread.setDaemon(true);
        thread.start();
        count++;
        try {
            ended.get(PATIENCE_S, TimeUnit.SECONDS);
        } catch (Exception error) {
            failed.add(name);
            System.err.println("FAILED: " + name);
            (error.getCause() == null ? error : error.getCause()).printStackTrace();
        }
    }

    /** Ends the program, with 1 where a test has failed. */
    void end() {
        System.out.println(count + " tests, " + failed.size() + " failed");
        System.exit(failed.isEmpty() ? 0 : 1);
    }

    static void equal(Object found, Object due) {
        if (!Objects.equals(found, due)) {
            throw new AssertionError("found " + found + "\n  due  " + due);
        }
    }

    /** The code of the failure that a call ends with. */
    static ErrorCode failure(Callable<?> call) throws Exception {
        try {
            Object found = call.call();
            throw new AssertionError("no failure, but " + found);
        } catch (HearthException error) {
            return error.code();
        }
    }

    /** A value whose numbers can be compared; without empty entries of maps where asked. */
    static Object plain(Object value, boolean withoutEmpty) {
        if (value instanceof Number number) {
            double rounded = number.doubleValue();
            boolean isExact = number instanceof Double || Math.abs(rounded) < 1L << 53;
            return isExact ? (Object) rounded : number.toString();
        }
        if (value instanceof List<?> list) {
            return list.stream().map(one -> plain(one, withoutEmpty)).toList();
        }
        if (!(value instanceof Map<?, ?> map)) {
            return value;
        }
        Map<Object, Object> found = new LinkedHashMap<>();
        map.forEach(
                (name, one) -> {
                    Object kept = plain(one, withoutEmpty);
                    List<Object> empties = List.of(0.0, "", List.of(), Map.of());
                    boolean isEmpty = kept != null && empties.contains(kept);
                    if (one != null && !(withoutEmpty && isEmpty)) {
                        found.put(name, kept);
                    }
                });
        return found;
    }
}
