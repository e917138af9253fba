package hearth.client;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.SocketChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicLong;

/**
 * The conversation with the daemon: one thread has the socket, the lease and all that is open. One
 * session at a time; a lost one is opened anew by the next request.
 */
final class Session implements Runnable, Zmtp.Listener {
    private static final long PROTOCOL = 1;

    /** Renewals in the time of a lease: two of them may be late. */
    private static final int RENEWALS = 3;

    /** The shortest time between two of them, whatever lease is given. */
    private static final long SHORTEST_RENEWAL_NANOS = 10_000_000;

    private static final long RETRY_NANOS = 20_000_000;
    private static final int BUFFER_BYTES = 128 << 10;
    private static final int READS = 16;
    private static final long MAX_UNSENT_BYTES = 256L << 20;
    /** Beyond them nothing more is answered to a daemon that takes nothing. */
    private static final int MAX_UNSENT_PARTS = 1 << 16;

    private static final ByteBuffer LEASE = Writer.write("lease", Map.of()).message();
    private static final ByteBuffer BYE = Writer.write("bye", Map.of()).message();

    /** What the builder of a client was told. */
    record Settings(
            Path path,
            Duration timeout,
            Duration silence,
            Duration answerTimeout,
            Map<String, Object> hello) {}

    private enum State {
        LOST,
        OPENING,
        OPEN
    }

    private final Settings settings;
    private final Selector selector;
    private final AtomicLong numbers = new AtomicLong();
    private final List<Runnable> tasks = new ArrayList<>();
    private boolean ended;

    // Of the session's thread.
    private final Map<String, Exchange> open = new LinkedHashMap<>();
    private final List<Exchange> waiting = new ArrayList<>();
    private final ArrayDeque<ByteBuffer> unsent = new ArrayDeque<>();
    private final ByteBuffer in = ByteBuffer.allocateDirect(BUFFER_BYTES);
    private final ByteBuffer out = ByteBuffer.allocateDirect(BUFFER_BYTES).flip();
    private Map<String, Object> hello = Map.of();
    private State state = State.LOST;
    private boolean closing;
    private Answers.Welcome welcome;
    private SocketChannel channel;
    private Zmtp zmtp;
    private long unsentBytes;
    private boolean unwritable;
    private long seen = System.nanoTime();
    private long now;
    private long openUntil;
    private long awaitedUntil;
    private long retryAt;
    private long heardAt;
    private long renewAt;
    private long overdueAt;

    Session(Settings settings) {
        this.settings = settings;
        this.awaitedUntil = seen;
        try {
            selector = Selector.open();
        } catch (IOException cause) {
            throw new UncheckedIOException(cause);
        }
    }

    // --- for any thread ---------------------------------------------------------------------

    /** Sends a request, once there is a session; its failure to be sent is its end. */
    Exchange request(String kind, Map<String, Object> fields, Class<?> ends) {
        String id = Long.toString(numbers.incrementAndGet());
        Map<String, Object> all = new LinkedHashMap<>(fields);
        all.put("id", id);
        Exchange exchange = new Exchange(id, Writer.write(kind, all), ends);
        post(() -> submit(exchange), exchange);
        return exchange;
    }

    /** Opens a session unless there is one; ends with its welcome. */
    Exchange connect() {
        Exchange exchange = new Exchange("", null, Answers.Welcome.class);
        post(() -> submit(exchange), exchange);
        return exchange;
    }

    /** Asks the daemon to end a generation. */
    void cancel(Exchange exchange) {
        post(() -> cancelNow(exchange), null);
    }

    /** Ends the session; all that is open ends with client_closed. */
    void close() {
        post(() -> closing = true, null);
    }

    private void post(Runnable task, Exchange exchange) {
        synchronized (tasks) {
            if (!ended) {
                tasks.add(task);
                selector.wakeup();
                return;
            }
        }
        if (exchange != null) {
            exchange.fail(closed());
        }
    }

    private static HearthException closed() {
        return HearthException.of(ErrorCode.CLIENT_CLOSED, "this client was closed: make another one");
    }

    // --- of the session's thread --------------------------------------------------------------

    @Override
    public void run() {
        while (!closing) {
            try {
                step();
            } catch (HearthException error) {
                lose(error);
            } catch (IOException | RuntimeException | OutOfMemoryError cause) {
                lose(lost("the connection failed: " + cause, cause));
            }
        }
        sayBye();
        lose(closed());
        synchronized (tasks) {
            ended = true;
        }
        runTasks();
        lose(closed());
        try {
            selector.close();
        } catch (IOException ignored) {
            // Nothing is left that could fail.
        }
    }

    private void step() throws IOException {
        selector.select(millisUntilDue());
        // Time in which this process stood still counts for little: the daemon may have, too.
        long clock = System.nanoTime();
        now += Math.min(clock - seen, tickNanos());
        seen = clock;
        selector.selectedKeys().clear();
        if (channel != null) {
            read();
        }
        runTasks();
        keepTime();
        if (channel != null) {
            write();
        }
    }

    private long tickNanos() {
        return settings.silence.toNanos() / RENEWALS;
    }

    private long millisUntilDue() {
        long due =
                switch (state) {
                    case LOST -> Long.MAX_VALUE;
                    case OPENING -> channel == null ? Math.min(retryAt, openUntil) : openUntil;
                    case OPEN -> Math.min(Math.min(renewAt, overdueAt), heardAt + settings.silence.toNanos());
                };
        // 0 would wait for ever.
        return due == Long.MAX_VALUE ? 0 : Math.max(1, Math.min(due - now, tickNanos()) / 1_000_000 + 1);
    }

    private void runTasks() {
        List<Runnable> found;
        synchronized (tasks) {
            found = List.copyOf(tasks);
            tasks.clear();
        }
        found.forEach(Runnable::run);
    }

    private void keepTime() throws IOException {
        if (state == State.OPENING) {
            if (now >= openUntil) {
                String text = "no welcome from a daemon at " + settings.path + " in time";
                throw HearthException.of(ErrorCode.CONNECTION_TIMEOUT, text);
            }
            if (channel == null && now >= retryAt) {
                connectNow();
            }
        } else if (state == State.OPEN) {
            if (now - heardAt >= settings.silence.toNanos()) {
                String text = "no answer from the daemon for " + settings.silence.toMillis() + " ms";
                throw HearthException.of(ErrorCode.CONNECTION_TIMEOUT, text);
            }
            if (now >= renewAt) {
                send(LEASE, List.of());
                renewed();
            }
            if (now >= overdueAt) {
                endOverdue();
            }
        }
    }

    private void endOverdue() {
        long most = settings.answerTimeout.toNanos();
        overdueAt = Long.MAX_VALUE;
        for (Exchange exchange : List.copyOf(open.values())) {
            if (now - exchange.heardAt >= most) {
                cancelNow(exchange);
                String text = "no answer to the request within " + most / 1_000_000 + " ms";
                end(exchange, HearthException.of(ErrorCode.CONNECTION_TIMEOUT, text));
            } else {
                overdueAt = Math.min(overdueAt, exchange.heardAt + most);
            }
        }
    }

    // --- connection ---------------------------------------------------------------------------

    private void submit(Exchange exchange) {
        if (state == State.OPEN) {
            begin(exchange);
            return;
        }
        waiting.add(exchange);
        if (state == State.LOST) {
            state = State.OPENING;
            openUntil = now + settings.timeout.toNanos();
            retryAt = now;
        }
    }

    private void connectNow() throws IOException {
        if (!Files.notExists(settings.path) && !Files.isWritable(settings.path)) {
            String text = "not allowed to use " + settings.path + ": join the group that owns it";
            throw HearthException.of(ErrorCode.NOT_ALLOWED, text);
        }
        retryAt = now + RETRY_NANOS;
        channel = SocketChannel.open(StandardProtocolFamily.UNIX);
        channel.configureBlocking(false);
        boolean isConnected;
        try {
            isConnected = channel.connect(UnixDomainSocketAddress.of(settings.path));
        } catch (IOException cause) {
            disconnect();
            if (seen - awaitedUntil >= 0) {
                String text = "no daemon listens at " + settings.path + ": start one with `hearth serve`";
                throw HearthException.of(ErrorCode.CONNECTION_REFUSED, text, cause);
            }
            return;
        }
        if (!isConnected) {
            // As many others wait as the daemon lets.
            disconnect();
            return;
        }
        channel.register(selector, SelectionKey.OP_READ);
        zmtp = new Zmtp(this);
        hello = new LinkedHashMap<>(settings.hello);
        hello.put("proto", List.of(PROTOCOL));
        queue(Zmtp.greeting());
        queue(Zmtp.ready());
    }

    private void disconnect() {
        if (channel != null) {
            try {
                channel.close();
            } catch (IOException ignored) {
                // It is given up anyway.
            }
        }
        channel = null;
        zmtp = null;
        unsent.clear();
        unsentBytes = 0;
        out.clear().flip();
        unwritable = false;
    }

    private void read() throws IOException {
        for (int i = 0; i < READS && channel != null; i++) {
            int count;
            try {
                count = channel.read(in.clear());
            } catch (IOException cause) {
                count = -1;
            }
            if (count < 0) {
                if (state == State.OPEN) {
                    throw lost("the daemon closed the connection", null);
                }
                disconnect();
            } else if (count == 0) {
                return;
            } else {
                zmtp.receive(in.flip());
            }
        }
    }

    private void write() throws IOException {
        try {
            while (!unwritable && (out.hasRemaining() || !unsent.isEmpty())) {
                gather();
                int before = out.remaining();
                unsentBytes -= channel.write(out);
                if (out.remaining() == before) {
                    break;
                }
            }
        } catch (IOException cause) {
            // What the daemon said before it closed is still to be read, and the end behind it.
            unwritable = true;
        }
        boolean isLeft = !unwritable && (out.hasRemaining() || !unsent.isEmpty());
        int interest = SelectionKey.OP_READ | (isLeft ? SelectionKey.OP_WRITE : 0);
        channel.keyFor(selector).interestOps(interest);
    }

    /** Fills the buffer of what is written next. */
    private void gather() {
        out.compact();
        while (out.hasRemaining() && !unsent.isEmpty()) {
            ByteBuffer next = unsent.peek();
            int part = Math.min(next.remaining(), out.remaining());
            out.put(next.slice().limit(part));
            next.position(next.position() + part);
            if (!next.hasRemaining()) {
                unsent.poll();
            }
        }
        out.flip();
    }

    private void send(ByteBuffer message, List<ByteBuffer> pictures) {
        queue(Zmtp.head(message.remaining(), !pictures.isEmpty()));
        queue(message.duplicate());
        for (int i = 0; i < pictures.size(); i++) {
            queue(Zmtp.head(pictures.get(i).remaining(), i + 1 < pictures.size()));
            queue(pictures.get(i));
        }
    }

    private void queue(ByteBuffer data) {
        unsent.add(data);
        unsentBytes += data.remaining();
    }

    private void sayBye() {
        try {
            if (state == State.OPEN) {
                send(BYE, List.of());
                write();
            }
        } catch (IOException ignored) {
            // The end of the connection says it as well.
        }
    }

    /** Ends the session and all that is open. */
    private void lose(HearthException error) {
        if (state == State.OPEN) {
            awaitedUntil = seen + settings.timeout.toNanos();
        }
        state = State.LOST;
        welcome = null;
        disconnect();
        List<Exchange> all = new ArrayList<>(open.values());
        all.addAll(waiting);
        open.clear();
        waiting.clear();
        all.forEach(exchange -> exchange.fail(error));
    }

    private static HearthException lost(String text, Throwable cause) {
        return HearthException.of(ErrorCode.CONNECTION_LOST, text, cause);
    }

    // --- requests -----------------------------------------------------------------------------

    private void begin(Exchange exchange) {
        if (exchange.request == null) {
            exchange.done(welcome);
            return;
        }
        HearthException refusal = refusal(exchange.request);
        if (refusal != null) {
            exchange.fail(refusal);
            return;
        }
        open.put(exchange.id, exchange);
        exchange.heardAt = now;
        overdueAt = Math.min(overdueAt, now + settings.answerTimeout.toNanos());
        send(exchange.request.message(), exchange.request.pictures());
        renewed();
    }

    /** What is wrong with a request by the limits; the daemon might not tell whose it was. */
    private HearthException refusal(Writer.Encoded request) {
        Answers.Limits limits = welcome.limits();
        int size = request.message().remaining();
        if (size > limits.frameBytes()) {
            String text = "the message has " + size + " bytes, the limit is " + limits.frameBytes();
            return HearthException.of(ErrorCode.MESSAGE_TOO_LARGE, text);
        }
        long all = 0;
        for (ByteBuffer picture : request.pictures()) {
            all += picture.remaining();
            if (limits.images() > 0 && picture.remaining() > limits.imageBytes()) {
                return tooLarge("a picture has", picture.remaining(), limits.imageBytes());
            }
        }
        int count = request.pictures().size();
        if (count > 0 && limits.images() == 0) {
            String text = "the daemon's model takes no pictures";
            return HearthException.of(ErrorCode.UNSUPPORTED_OPTION, text, "messages");
        }
        if (count > limits.images()) {
            String text = "the request has " + count + " pictures, the limit is " + limits.images();
            return HearthException.of(ErrorCode.INVALID_VALUE, text, "messages");
        }
        if (count > 0 && all > limits.requestImageBytes()) {
            return tooLarge("the pictures have", all, limits.requestImageBytes());
        }
        if (unsentBytes > 0 && unsentBytes + size + all > MAX_UNSENT_BYTES) {
            String text = "the daemon has not taken " + unsentBytes + " bytes of other requests yet";
            return HearthException.of(ErrorCode.TOO_MANY_REQUESTS, text);
        }
        return null;
    }

    private static HearthException tooLarge(String what, long size, long limit) {
        String text = what + " " + size + " bytes, the limit is " + limit;
        return HearthException.of(ErrorCode.IMAGE_TOO_LARGE, text, "messages");
    }

    private void cancelNow(Exchange exchange) {
        if (open.containsKey(exchange.id) && exchange.ends == Answers.Done.class && !exchange.cancelled) {
            exchange.cancelled = true;
            send(Writer.write("cancel", Map.of("id", exchange.id)).message(), List.of());
            renewed();
        } else if (waiting.remove(exchange)) {
            Answers.Usage nothing = new Answers.Usage(0, 0, 0, 0, 0, 0, 0);
            exchange.done(new Answers.Done("cancelled", nothing, null, null, "", List.of()));
        }
    }

    private void end(Exchange exchange, HearthException error) {
        open.remove(exchange.id);
        exchange.fail(error);
    }

    private void renewed() {
        double lease = welcome.limits().leaseS() * 1e9;
        long renewal = (long) Math.min(lease, settings.silence.toNanos()) / RENEWALS;
        renewAt = now + Math.max(renewal, SHORTEST_RENEWAL_NANOS);
    }

    // --- answers ------------------------------------------------------------------------------

    @Override
    public void ready() {
        send(Writer.write("hello", hello).message(), List.of());
    }

    @Override
    public void reply(ByteBuffer data) {
        if (unsent.size() > MAX_UNSENT_PARTS) {
            String text = "the daemon asks on and takes nothing";
            throw HearthException.of(ErrorCode.CONNECTION_TIMEOUT, text);
        }
        queue(data);
    }

    @Override
    public void message(byte[] data) {
        Reader.Arrived arrived = Reader.read(data);
        heardAt = now;
        if (arrived == null || arrived.answer() instanceof Answers.Leased) {
            return;
        }
        if (arrived.answer() instanceof Answers.Welcome news) {
            welcomed(news);
            return;
        }
        if (arrived.answer() instanceof Answers.Failure failure
                && (arrived.id().isEmpty() || failure.code().equals("hello_required"))) {
            fault(failure);
            return;
        }
        Exchange exchange = open.get(arrived.id());
        if (exchange != null) {
            exchange.heardAt = now;
            answered(exchange, arrived.answer());
        }
    }

    private void welcomed(Answers.Welcome news) {
        if (news.proto() != PROTOCOL) {
            String text = "the daemon speaks protocol " + news.proto() + ", which was not offered";
            throw HearthException.of(ErrorCode.UNSUPPORTED_PROTOCOL, text, "proto");
        }
        double lease = news.limits().leaseS();
        if (!(lease > 0 && lease < Double.POSITIVE_INFINITY)) {
            String text = "the daemon gives a lease of " + lease + " s";
            throw HearthException.of(ErrorCode.PROTOCOL_VIOLATION, text, "lease_s");
        }
        if (state == State.OPEN && !news.epoch().equals(welcome.epoch())) {
            throw lost("the daemon was restarted", null);
        }
        welcome = news;
        renewed();
        if (state == State.OPENING) {
            state = State.OPEN;
            overdueAt = Long.MAX_VALUE;
            List<Exchange> due = List.copyOf(waiting);
            waiting.clear();
            due.forEach(this::begin);
        }
    }

    /** An error that ends no single request. */
    private void fault(Answers.Failure failure) {
        boolean isAboutFeatures =
                failure.code().equals("unsupported_option") && failure.field().equals("features");
        boolean isOpening = state == State.OPENING;
        if (isOpening && isAboutFeatures && hello.remove("features") != null) {
            ready();
        } else if (isOpening
                ? !failure.code().equals("hello_required")
                : List.of("hello_required", "lease_expired", "not_allowed").contains(failure.code())) {
            throw HearthException.of(failure);
        }
    }

    private void answered(Exchange exchange, Object answer) {
        if (answer instanceof Answers.Failure failure) {
            end(exchange, HearthException.of(failure));
        } else if (answer.getClass() == exchange.ends) {
            open.remove(exchange.id);
            exchange.done(answer);
        } else if (exchange.ends == Answers.Done.class && answer instanceof Answers.Accepted accepted) {
            exchange.accepted.complete(accepted);
        } else if (exchange.ends == Answers.Done.class && answer instanceof Answers.Delta delta) {
            append(exchange, delta);
        } else {
            String text = "the daemon answered with another kind of message";
            end(exchange, HearthException.of(ErrorCode.PROTOCOL_VIOLATION, text));
        }
    }

    private void append(Exchange exchange, Answers.Delta delta) {
        // A reader that waits for it learns that it does not come.
        exchange.accepted.cancel(false);
        if (delta.seq() != exchange.nextSeq) {
            cancelNow(exchange);
            String text = "delta " + delta.seq() + " came where " + exchange.nextSeq + " was due";
            end(exchange, HearthException.of(ErrorCode.PROTOCOL_VIOLATION, text, "seq"));
        } else if (!exchange.add(delta)) {
            cancelNow(exchange);
            String text = "the reply was not read, and too much of it waited";
            end(exchange, HearthException.of(ErrorCode.SLOW_CLIENT, text));
        }
        exchange.nextSeq++;
    }
}
