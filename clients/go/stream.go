package hearth

import (
	"encoding/json"
	"sort"
	"strings"
)

// Stream is a generation as it comes. Its methods are for one goroutine, but Cancel and Close for
// any. Read it to its end or close it: a stream of which more than Options.ReadAhead bytes wait
// unread is cancelled, and ends with SlowClient.
type Stream struct {
	exchange *exchange
	delta    Delta
	finished bool
}

// Next waits for the next delta. False says that the generation has ended: see Err, then Done.
func (s *Stream) Next() bool {
	delta := s.exchange.take()
	if delta == nil {
		s.finished, s.delta = true, Delta{}
		return false
	}
	s.delta = *delta
	return true
}

// Delta is what the last Next has brought.
func (s *Stream) Delta() Delta { return s.delta }

// Err is nil until Next has returned false, and where the generation ended as it should, also by
// Cancel. Else it is an *Error, or the error of the context.
func (s *Stream) Err() error {
	if !s.finished {
		return nil
	}
	return s.exchange.err
}

// Done has reason and usage; nil until Next has returned false, and after a failure.
func (s *Stream) Done() *Done {
	if !s.finished || s.exchange.err != nil {
		return nil
	}
	return &s.exchange.answer.(*doneAnswer).Done
}

// Accepted waits until the request is in the daemon's queue. It returns the failure of a request
// that was refused, and nil for one whose end came without this notice.
func (s *Stream) Accepted() (*Accepted, error) {
	x := s.exchange
	x.mu.Lock()
	defer x.mu.Unlock()
	for x.accepted == nil && len(x.deltas) == 0 && !x.ended() {
		x.changed.Wait()
	}
	if x.accepted != nil {
		return x.accepted, nil
	}
	return nil, x.err
}

// Cancel asks the daemon to end the generation, which then ends with the reason "cancelled".
func (s *Stream) Cancel() {
	x := s.exchange
	x.mu.Lock()
	ended := x.ended()
	x.mu.Unlock()
	if !ended {
		x.session.cancel(x)
	}
}

// Close cancels a generation that has not ended, and drops what was not read. It may be repeated.
func (s *Stream) Close() error {
	s.exchange.abandon(failure(ClientClosed, "", nil, "the stream was closed"))
	return nil
}

// Reply is one reply as far as it came.
type Reply struct {
	Text      string
	Reasoning string
	Tokens    []int
	// ToolCalls are those that are whole.
	ToolCalls []ToolCall
}

// Message is the reply as a turn of the conversation.
func (r *Reply) Message() Message {
	return Message{
		Role: "assistant", Text: r.Text, Reasoning: r.Reasoning, ToolCalls: r.ToolCalls,
	}
}

// Collect reads the stream to its end and joins its deltas: one reply, or N of them in their order.
// With an error it returns what had come.
func (s *Stream) Collect() ([]Reply, error) {
	type parts struct {
		text, reasoning strings.Builder
		tokens          []int
		calls           map[int]*ToolCall
	}
	choices := map[int]*parts{0: {calls: map[int]*ToolCall{}}}
	for s.Next() {
		one := choices[s.delta.Choice]
		if one == nil {
			one = &parts{calls: map[int]*ToolCall{}}
			choices[s.delta.Choice] = one
		}
		one.text.WriteString(s.delta.Text)
		one.reasoning.WriteString(s.delta.Reasoning)
		one.tokens = append(one.tokens, s.delta.Tokens...)
		for _, piece := range s.delta.ToolCalls {
			call := one.calls[piece.Index]
			if call == nil {
				call = &ToolCall{ID: piece.ID, Name: piece.Name}
				one.calls[piece.Index] = call
			}
			call.Arguments = append(call.Arguments, piece.Arguments...)
		}
	}
	replies := make([]Reply, 0, len(choices))
	for _, choice := range sorted(choices) {
		one := choices[choice]
		reply := Reply{Text: one.text.String(), Reasoning: one.reasoning.String(), Tokens: one.tokens}
		for _, index := range sorted(one.calls) {
			// max_tokens may have cut the last one.
			if call := one.calls[index]; json.Valid(call.Arguments) {
				reply.ToolCalls = append(reply.ToolCalls, *call)
			}
		}
		replies = append(replies, reply)
	}
	return replies, s.Err()
}

func sorted[V any](values map[int]V) []int {
	keys := make([]int, 0, len(values))
	for key := range values {
		keys = append(keys, key)
	}
	sort.Ints(keys)
	return keys
}
