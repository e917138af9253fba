package hearth

import (
	"errors"
	"math"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"hearth/internal/zmtp"
)

const (
	// Renewals in the time of a lease: two of them may be late.
	renewals = 3
	// The shortest time between two of them, whatever lease is given.
	shortestRenewal = 10 * time.Millisecond
	// Time for the last message to leave, and for the last ones to be read.
	farewell = 100 * time.Millisecond
)

// session is one conversation with the daemon, from its welcome to its loss. One goroutine reads;
// another one writes, and keeps the lease.
type session struct {
	options *Options
	conn    *zmtp.Conn
	ids     *atomic.Uint64
	writes  chan *message
	over    chan struct{}
	heard   atomic.Bool

	mu      sync.Mutex
	welcome *Welcome
	open    map[string]*exchange
	err     *Error
	endedAt time.Time
}

func newSession(
	options *Options, ids *atomic.Uint64, conn *zmtp.Conn, welcome *Welcome,
) *session {
	s := &session{
		options: options, ids: ids, conn: conn, welcome: welcome,
		writes: make(chan *message), over: make(chan struct{}), open: map[string]*exchange{},
	}
	s.heard.Store(true)
	go s.read()
	go s.write(welcome.Limits.LeaseS)
	return s
}

// end loses the session, once: every open request ends with err.
func (s *session) end(err *Error) {
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	s.err, s.endedAt = err, time.Now()
	open := s.open
	s.open = nil
	s.mu.Unlock()
	for _, x := range open {
		x.end(nil, err)
	}
	close(s.over)
	if err.Code == ClientClosed {
		// What is written now may hold the lock of the connection; this bounds its wait too.
		s.conn.SetTimeout(farewell)
		_ = s.conn.Write(bye)
	}
	_ = s.conn.Close()
}

// fault is what is wrong with a welcome that could be read; nil where nothing is.
func (w *Welcome) fault() *Error {
	switch lease := w.Limits.LeaseS; {
	case w.Proto != protocol:
		return failure(UnsupportedProtocol, "proto", nil, "the daemon speaks protocol %d alone", w.Proto)
	case !(lease > 0) || math.IsInf(lease, 1):
		return failure(ProtocolViolation, "lease_s", nil, "the daemon gives a lease of %v s", lease)
	}
	return nil
}

func (s *session) lost() *Error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// write sends what is to be sent, and lease by the clock. A tick without an answer since the last
// one counts as silence, so that time in which this process stood still counts for one of them.
func (s *session) write(leaseS float64) {
	// A float beyond a Duration has no meaning as one, so the least is taken of floats.
	every := time.Duration(math.Min(leaseS*float64(time.Second), float64(s.options.Silence)) / renewals)
	if every < shortestRenewal {
		every = shortestRenewal
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	var silent time.Duration
	for {
		out := &message{data: leaseMessage}
		select {
		case <-s.over:
			return
		case out = <-s.writes:
		case <-ticker.C:
			if s.heard.Swap(false) {
				silent = 0
			} else {
				silent += every
			}
			if silent >= s.options.Silence {
				s.end(failure(ConnectionTimeout, "", nil, "the daemon has been silent for %v", silent))
				return
			}
		}
		if err := s.conn.Write(append([][]byte{out.data}, out.frames...)...); err != nil {
			// What the daemon had sent before it went is still to be read.
			select {
			case <-s.over:
			case <-time.After(farewell):
				s.end(s.lossOf(err))
			}
			return
		}
	}
}

func (s *session) lossOf(err error) *Error {
	var violation zmtp.Violation
	switch {
	case errors.As(err, &violation):
		return failure(ProtocolViolation, "", err, "the daemon broke the wire protocol: %v", err)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return failure(ConnectionTimeout, "", err, "the daemon does not take messages any more")
	default:
		return failure(ConnectionLost, "", err, "the daemon closed the connection")
	}
}

func (s *session) read() {
	for {
		frame, err := s.conn.Read()
		if err != nil {
			s.end(s.lossOf(err))
			return
		}
		s.heard.Store(true)
		answer, err := decodeAnswer(frame)
		if err != nil {
			s.end(failure(ProtocolViolation, "", err, "the daemon sent what cannot be read: %v", err))
			return
		}
		s.take(answer, len(frame))
	}
}

func (s *session) take(answer any, bytes int) {
	switch answer := answer.(type) {
	case *Welcome:
		if err := answer.fault(); err != nil {
			s.end(err)
			return
		}
		s.mu.Lock()
		restarted := answer.Epoch != s.welcome.Epoch
		s.welcome = answer
		s.mu.Unlock()
		if restarted {
			s.end(failure(ConnectionLost, "", nil, "the daemon was restarted"))
		}
	case *acceptedAnswer:
		x := s.find(answer.ID)
		switch {
		case x == nil:
		case !x.generates:
			s.close(x, nil, failure(ProtocolViolation, "", nil, "accepted answers what is no generation"))
		default:
			x.accept(&answer.Accepted)
		}
	case *deltaAnswer:
		x := s.find(answer.ID)
		switch {
		case x == nil:
		case !x.generates:
			s.close(x, nil, failure(ProtocolViolation, "", nil, "a delta answers what is no generation"))
		case answer.Seq != x.seq:
			s.close(x, nil, failure(ProtocolViolation, "seq", nil,
				"delta %d came where %d was due", answer.Seq, x.seq))
		default:
			x.seq++
			if !x.put(&answer.Delta, bytes) {
				s.close(x, nil, failure(SlowClient, "", nil,
					"%d bytes of the stream have not been read", s.options.ReadAhead))
				go s.cancel(x)
			}
		}
	case *doneAnswer:
		s.terminal(answer.ID, answer, true)
	case *tokensAnswer:
		s.terminal(answer.ID, answer, false)
	case *textAnswer:
		s.terminal(answer.ID, answer, false)
	case *statusAnswer:
		s.terminal(answer.ID, answer, false)
	case *errorAnswer:
		s.fault(answer)
	}
}

func (s *session) fault(answer *errorAnswer) {
	err := answer.error()
	if answer.ID != "" && err.Code != ConnectionLost {
		if x := s.find(answer.ID); x != nil {
			s.close(x, nil, err)
		}
		return
	}
	switch err.Code {
	case ConnectionLost, LeaseExpired, NotAllowed:
		s.end(err)
	}
	// Others answer one message that names no request; all goes on.
}

func (s *session) terminal(id string, answer any, ofGeneration bool) {
	x := s.find(id)
	switch {
	case x == nil:
	case x.generates != ofGeneration:
		s.close(x, nil, failure(ProtocolViolation, "", nil, "the daemon answered another question"))
	default:
		s.close(x, answer, nil)
	}
}

// start opens a request and sends it; encode gets its id.
func (s *session) start(
	x *exchange, done <-chan struct{}, encode func(id string) (*message, error),
) error {
	x.id = strconv.FormatUint(s.ids.Add(1), 10)
	s.mu.Lock()
	limits := s.welcome.Limits
	s.mu.Unlock()
	out, err := encode(x.id)
	if err != nil {
		return err
	}
	if err := check(out, &limits); err != nil {
		return err
	}
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return s.err
	}
	s.open[x.id] = x
	s.mu.Unlock()
	select {
	case s.writes <- out:
	case <-x.over:
	case <-done:
		s.forget(x)
	}
	return nil
}

// check refuses what would end no request when the daemon refuses it, or cost the connection.
func check(out *message, limits *Limits) error {
	if len(out.data) > limits.FrameBytes {
		return failure(MessageTooLarge, "", nil,
			"the message has %d bytes, the limit is %d", len(out.data), limits.FrameBytes)
	}
	if len(out.frames) == 0 {
		return nil
	}
	if limits.Images == 0 {
		return failure(UnsupportedOption, "messages", nil, "the daemon's model takes no images")
	}
	if len(out.frames) > limits.Images {
		return failure(InvalidValue, "messages", nil,
			"the request has %d pictures, the limit is %d", len(out.frames), limits.Images)
	}
	sum := 0
	for _, frame := range out.frames {
		if len(frame) > limits.ImageBytes {
			return failure(ImageTooLarge, "messages", nil,
				"a picture has %d bytes, the limit is %d", len(frame), limits.ImageBytes)
		}
		sum += len(frame)
	}
	if sum > limits.RequestImageBytes {
		return failure(ImageTooLarge, "messages", nil,
			"the pictures have %d bytes together, the limit is %d", sum, limits.RequestImageBytes)
	}
	return nil
}

// cancel tells the daemon to end a generation.
func (s *session) cancel(x *exchange) {
	data, err := encode(map[string]any{"t": "cancel", "id": x.id})
	if err != nil {
		return
	}
	select {
	case s.writes <- &message{data: data}:
	case <-s.over:
	}
}

func (s *session) find(id string) *exchange {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open[id]
}

// forget takes a request off the open ones; false where it was none.
func (s *session) forget(x *exchange) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, there := s.open[x.id]
	delete(s.open, x.id)
	return there
}

func (s *session) close(x *exchange, answer any, err error) {
	s.forget(x)
	x.end(answer, err)
}
