package hearth

import (
	"context"
	"sync"
)

// exchange is one request and what has come for it. The session's reader fills it.
type exchange struct {
	id        string
	session   *session
	generates bool

	mu       sync.Mutex
	changed  *sync.Cond
	accepted *Accepted
	deltas   []queued
	bytes    int
	seq      int64
	answer   any
	err      error
	over     chan struct{}
}

type queued struct {
	delta *Delta
	bytes int
}

func newExchange(id string, session *session, generates bool) *exchange {
	x := &exchange{id: id, session: session, generates: generates, over: make(chan struct{})}
	x.changed = sync.NewCond(&x.mu)
	return x
}

// ended is for holders of the lock.
func (x *exchange) ended() bool { return x.answer != nil || x.err != nil }

// end sets the one end of the request; later ones change nothing.
func (x *exchange) end(answer any, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.ended() {
		return
	}
	x.answer, x.err = answer, err
	close(x.over)
	x.changed.Broadcast()
}

// abandon ends a request whose caller waits no more: the daemon is told, and nothing is kept.
func (x *exchange) abandon(err error) {
	x.end(nil, err)
	x.mu.Lock()
	x.deltas, x.bytes = nil, 0
	x.mu.Unlock()
	if x.session.forget(x) && x.generates {
		x.session.cancel(x)
	}
}

// watch ends the request with its context.
func (x *exchange) watch(ctx context.Context) {
	if ctx.Done() == nil {
		return
	}
	go func() {
		select {
		case <-ctx.Done():
			x.abandon(ctx.Err())
		case <-x.over:
		}
	}()
}

// put adds a delta; false where more than ReadAhead bytes of them wait. The protocol has no flow
// control of one stream, and to read no more would hold up all others.
func (x *exchange) put(delta *Delta, bytes int) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.bytes > x.session.options.ReadAhead {
		return false
	}
	if !x.ended() {
		x.deltas = append(x.deltas, queued{delta, bytes})
		x.bytes += bytes
		x.changed.Broadcast()
	}
	return true
}

// take waits for the next delta; nil when the request has ended and none is left.
func (x *exchange) take() *Delta {
	x.mu.Lock()
	defer x.mu.Unlock()
	for len(x.deltas) == 0 && !x.ended() {
		x.changed.Wait()
	}
	if len(x.deltas) == 0 {
		return nil
	}
	first := x.deltas[0]
	x.deltas[0] = queued{}
	x.deltas = x.deltas[1:]
	x.bytes -= first.bytes
	return first.delta
}

func (x *exchange) accept(accepted *Accepted) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.accepted == nil {
		x.accepted = accepted
	}
	x.changed.Broadcast()
}
