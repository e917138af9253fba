// Package hearth is a client of the Hearth daemon, which serves language and vision-language models
// on a local socket.
//
//	client, err := hearth.Dial(ctx, hearth.Options{})
//	stream, err := client.Generate(ctx, &hearth.Generate{Prompt: "Once upon"})
//	for stream.Next() {
//		fmt.Print(stream.Delta().Text)
//	}
//	err = stream.Err()
//
// It speaks ZMTP by itself and needs no native library. A context ends what waits for it; every
// other wait has a deadline.
package hearth

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"hearth/internal/zmtp"
)

// Features of the protocol that a client has unless it is told others.
var Features = []string{"reasoning", "tool_calls", "end_details", "token_bytes"}

const (
	protocol         = 1
	defaultTimeout   = 5 * time.Second
	defaultReadAhead = 8 << 20
	// Times between attempts to reach a daemon that is about to come back.
	firstPause, lastPause = 20 * time.Millisecond, 200 * time.Millisecond
)

var (
	leaseMessage = []byte("\x81\xa1t\xa5lease")
	bye          = []byte("\x81\xa1t\xa3bye")
)

// Options of a client; zero values have defaults.
type Options struct {
	// Address is a path or ipc://PATH; default $HEARTH_SOCKET, else the agreed place.
	Address string
	// Name is for the daemon's logs.
	Name string
	// Timeout for a session to open, 5 s by default. A daemon that was met and has gone is waited
	// for as long.
	Timeout time.Duration
	// Silence after which a daemon that answers nothing counts as lost, 5 s by default.
	Silence time.Duration
	// Lease asked of the daemon; 0 takes the daemon's own.
	Lease time.Duration
	// Features in place of those of the variable Features. None is an empty slice that is not nil.
	Features []string
	// ReadAhead is the bytes of one stream that may wait unread, 8 MiB by default.
	ReadAhead int
}

// Client has one session at a time. A lost one is opened anew by the next call. Its methods are for
// any number of goroutines.
type Client struct {
	options Options
	path    string
	closed  chan struct{}
	closing sync.Once
	// ids counts requests of all sessions: answers of a lost one name none of the next.
	ids atomic.Uint64
	// turn is held by the one who opens or looks at the session.
	turn    chan struct{}
	session *session
}

// Dial makes a client and opens its session.
func Dial(ctx context.Context, options Options) (*Client, error) {
	path, err := socketPath(options.Address)
	if err != nil {
		return nil, err
	}
	for _, one := range []*time.Duration{&options.Timeout, &options.Silence} {
		if *one <= 0 {
			*one = defaultTimeout
		}
	}
	if options.ReadAhead <= 0 {
		options.ReadAhead = defaultReadAhead
	}
	if options.Features == nil {
		options.Features = Features
	}
	c := &Client{
		options: options, path: path, closed: make(chan struct{}), turn: make(chan struct{}, 1),
	}
	if _, err := c.open(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// Connect returns what the daemon says of itself, in a new session where the last one was lost.
func (c *Client) Connect(ctx context.Context) (Welcome, error) {
	s, err := c.open(ctx)
	if err != nil {
		return Welcome{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return *s.welcome, nil
}

// Generate starts a generation. The context is that of the whole stream: with its end the daemon
// cancels the request and the stream fails with the context's error.
func (c *Client) Generate(ctx context.Context, request *Generate) (*Stream, error) {
	x, err := c.start(ctx, true, request.encode)
	if err != nil {
		return nil, err
	}
	return &Stream{exchange: x}, nil
}

// Tokenize returns token ids.
func (c *Client) Tokenize(ctx context.Context, request *Tokenize) ([]int, error) {
	answer, err := ask[*tokensAnswer](ctx, c, request.encode)
	if err != nil {
		return nil, err
	}
	return answer.Tokens, nil
}

// Detokenize returns the text of token ids.
func (c *Client) Detokenize(ctx context.Context, tokens []int) (string, error) {
	if tokens == nil {
		tokens = []int{}
	}
	answer, err := ask[*textAnswer](ctx, c, func(id string) (*message, error) {
		data, err := encode(map[string]any{"t": "detokenize", "id": id, "tokens": tokens})
		return &message{data: data}, err
	})
	if err != nil {
		return "", err
	}
	return answer.Text, nil
}

// Status tells what the daemon serves and does.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	answer, err := ask[*statusAnswer](ctx, c, func(id string) (*message, error) {
		data, err := encode(map[string]any{"t": "status", "id": id})
		return &message{data: data}, err
	})
	if err != nil {
		return nil, err
	}
	return &answer.Status, nil
}

// Close says goodbye. What is open ends with ClientClosed; so does each call that follows.
func (c *Client) Close() error {
	c.closing.Do(func() {
		close(c.closed)
		// Whoever opens a session stops at once, as its connection is interrupted.
		c.turn <- struct{}{}
		if c.session != nil {
			c.session.end(errClosed())
		}
		<-c.turn
	})
	return nil
}

func errClosed() *Error {
	return failure(ClientClosed, "", nil, "this client was closed: dial another one")
}

// ask sends a request that one answer ends.
func ask[T any](
	ctx context.Context, c *Client, encode func(id string) (*message, error),
) (answer T, err error) {
	x, err := c.start(ctx, false, encode)
	if err != nil {
		return answer, err
	}
	<-x.over
	if x.err != nil {
		return answer, x.err
	}
	answer, ok := x.answer.(T)
	if !ok {
		err = failure(ProtocolViolation, "", nil, "the daemon answered another question")
	}
	return answer, err
}

func (c *Client) start(
	ctx context.Context, generates bool, encode func(id string) (*message, error),
) (*exchange, error) {
	s, err := c.open(ctx)
	if err != nil {
		return nil, err
	}
	x := newExchange("", s, generates)
	if err := s.start(x, ctx.Done(), encode); err != nil {
		return nil, err
	}
	x.watch(ctx)
	return x, nil
}

// open returns the session, a new one where there is none.
func (c *Client) open(ctx context.Context) (*session, error) {
	select {
	case c.turn <- struct{}{}:
	case <-c.closed:
		return nil, errClosed()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-c.turn }()
	select {
	case <-c.closed:
		return nil, errClosed()
	default:
	}
	now := time.Now()
	// A daemon is waited for only where one was met, which may come back.
	awaited := now
	if c.session != nil {
		if c.session.lost() == nil {
			return c.session, nil
		}
		awaited = c.session.endedAt.Add(c.options.Timeout)
	}
	session, err := c.dial(ctx, now.Add(c.options.Timeout), awaited)
	if err != nil {
		return nil, err
	}
	c.session = session
	return session, nil
}

// dial tries until deadline to get a welcome, and until awaited also where nobody listens.
func (c *Client) dial(ctx context.Context, deadline, awaited time.Time) (*session, error) {
	pause := firstPause
	for {
		session, err := c.attempt(ctx, deadline)
		if err == nil {
			return session, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		var known *Error
		until := deadline
		switch {
		case errors.As(err, &known):
			return nil, err
		case errors.Is(err, fs.ErrPermission):
			return nil, failure(NotAllowed, "", err, "not allowed to use %s: join its group", c.path)
		case absent(err):
			err = failure(ConnectionRefused, "", err,
				"no daemon listens at %s: start one with `hearth serve`", c.path)
			until = awaited
		default:
			err = failure(ConnectionTimeout, "", err,
				"no answer from a daemon at %s within %v", c.path, c.options.Timeout)
		}
		if time.Now().Add(pause).After(until) {
			return nil, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-c.closed:
			return nil, errClosed()
		}
		if pause *= 2; pause > lastPause {
			pause = lastPause
		}
	}
}

// attempt makes one connection and shakes hands on it. An error that is no *Error may pass.
func (c *Client) attempt(ctx context.Context, deadline time.Time) (*session, error) {
	socket, err := (&net.Dialer{Deadline: deadline}).DialContext(ctx, "unix", c.path)
	if err != nil {
		return nil, err
	}
	if err := socket.SetDeadline(deadline); err != nil {
		return nil, err
	}
	conn, welcome, err := c.interruptible(ctx, socket)
	if err != nil {
		_ = socket.Close()
		return nil, err
	}
	return newSession(&c.options, &c.ids, conn, welcome), nil
}

// interruptible shakes hands until the context ends or the client is closed.
func (c *Client) interruptible(
	ctx context.Context, socket net.Conn,
) (conn *zmtp.Conn, welcome *Welcome, err error) {
	shaken := make(chan struct{})
	watched := make(chan error)
	go func() {
		select {
		case <-ctx.Done():
			_ = socket.SetDeadline(time.Unix(1, 0))
			watched <- ctx.Err()
		case <-c.closed:
			_ = socket.SetDeadline(time.Unix(1, 0))
			watched <- errClosed()
		case <-shaken:
			watched <- nil
		}
	}()
	conn, err = zmtp.Handshake(socket, c.options.Silence)
	if err == nil {
		welcome, err = c.hello(conn)
	}
	close(shaken)
	if interrupted := <-watched; interrupted != nil {
		return nil, nil, interrupted
	}
	var violation zmtp.Violation
	if errors.As(err, &violation) {
		err = failure(ProtocolViolation, "", err, "the daemon broke the wire protocol: %v", err)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = failure(ConnectionTimeout, "", err,
			"no answer from a daemon at %s within %v", c.path, c.options.Timeout)
	}
	if err != nil {
		return nil, nil, err
	}
	return conn, welcome, socket.SetReadDeadline(time.Time{})
}

// hello opens the session. A daemon of 0.1.0 refuses features and is asked again without.
func (c *Client) hello(conn *zmtp.Conn) (*Welcome, error) {
	hello := map[string]any{"t": "hello", "proto": []int{protocol}}
	if c.options.Name != "" {
		hello["client"] = c.options.Name
	}
	if c.options.Lease > 0 {
		hello["lease_s"] = c.options.Lease.Seconds()
	}
	if len(c.options.Features) > 0 {
		hello["features"] = c.options.Features
	}
	for {
		data, err := encode(hello)
		if err != nil {
			return nil, err
		}
		if err := conn.Write(data); err != nil {
			return nil, err
		}
		again, welcome, err := welcomed(conn)
		if _, said := hello["features"]; !again || !said {
			return welcome, err
		}
		delete(hello, "features")
	}
}

// welcomed waits for the answer to hello; again where its features were refused.
func welcomed(conn *zmtp.Conn) (again bool, _ *Welcome, _ error) {
	for {
		frame, err := conn.Read()
		if err != nil {
			return false, nil, err
		}
		answer, err := decodeAnswer(frame)
		if err != nil {
			return false, nil, failure(ProtocolViolation, "", err,
				"the daemon sent what cannot be read: %v", err)
		}
		switch answer := answer.(type) {
		case *Welcome:
			if err := answer.fault(); err != nil {
				return false, nil, err
			}
			return false, answer, nil
		case *errorAnswer:
			// It answers what came before hello, for another one.
			if answer.Code != "hello_required" && answer.ID == "" {
				refused := answer.Code == string(UnsupportedOption) && answer.Field == "features"
				return refused, nil, answer.error()
			}
		}
	}
}
