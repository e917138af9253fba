package hearth

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/vmihailenco/msgpack/v5"
)

// Limits of the daemon: sizes in bytes, lengths in tokens, times in seconds.
type Limits struct {
	FrameBytes        int     `json:"frame_bytes"`
	Frames            int     `json:"frames"`
	RequestsPerClient int     `json:"requests_per_client"`
	PromptTokens      int     `json:"prompt_tokens"`
	TotalTokens       int     `json:"total_tokens"`
	QueuedRequests    int     `json:"queued_requests"`
	QueuedTokens      int     `json:"queued_tokens"`
	LeaseS            float64 `json:"lease_s"`
	// Images of one request, 0 where the model sees none.
	Images            int `json:"images,omitempty"`
	ImageBytes        int `json:"image_bytes,omitempty"`
	RequestImageBytes int `json:"request_image_bytes,omitempty"`
	ImageTokens       int `json:"image_tokens,omitempty"`
}

// Welcome is what the daemon says of itself when a session opens.
type Welcome struct {
	Proto      int      `json:"proto"`
	Server     string   `json:"server"`
	Limits     Limits   `json:"limits"`
	Features   []string `json:"features,omitempty"`
	Model      string   `json:"model,omitempty"`
	Epoch      string   `json:"epoch,omitempty"`
	Adapters   []string `json:"adapters,omitempty"`
	ToolFormat string   `json:"tool_format,omitempty"`
}

// Accepted says that a request is in the queue.
type Accepted struct {
	PromptTokens int `json:"prompt_tokens"`
	// Request is its id in the daemon's logs and traces.
	Request string `json:"request,omitempty"`
}

// Delta is more of a reply.
type Delta struct {
	Text      string         `json:"text"`
	Tokens    []int          `json:"tokens,omitempty"`
	Reasoning string         `json:"reasoning,omitempty"`
	ToolCalls []CallPiece    `json:"tool_calls,omitempty"`
	Logprobs  []TokenLogprob `json:"logprobs,omitempty"`
	// Ended is when the engine step of the last token ended, in seconds of CLOCK_MONOTONIC; nil
	// unless the request set Timestamps.
	Ended *float64 `json:"ended,omitempty"`
	// Choice tells the replies of a request for several apart.
	Choice int `json:"choice,omitempty"`
}

// CallPiece is more of call Index of a turn: ID and Name in its first piece, then JSON text.
type CallPiece struct {
	Index     int    `json:"index"`
	ID        string `json:"id,omitempty"`
	Name      string `json:"name,omitempty"`
	Arguments string `json:"arguments,omitempty"`
}

// TokenLogprob is the natural logarithm of a token's probability, and alternatives to the token.
type TokenLogprob struct {
	Logprob    float64       `json:"logprob"`
	Top        []TokenChance `json:"top,omitempty"`
	TokenBytes []byte        `json:"token_bytes,omitempty"`
	TopBytes   [][]byte      `json:"top_bytes,omitempty"`
}

// TokenChance is a token that might have been taken.
type TokenChance struct {
	_msgpack struct{} `msgpack:",as_array"` // The encoder reads this.

	Token   int
	Logprob float64
}

// Usage counts tokens, and times in milliseconds.
type Usage struct {
	PromptTokens     int     `json:"prompt_tokens"`
	CompletionTokens int     `json:"completion_tokens"`
	ReasoningTokens  int     `json:"reasoning_tokens,omitempty"`
	CachedTokens     int     `json:"cached_tokens,omitempty"`
	QueueMs          float64 `json:"queue_ms,omitempty"`
	PrefillMs        float64 `json:"prefill_ms,omitempty"`
	DecodeMs         float64 `json:"decode_ms,omitempty"`
}

// ImageUsage tells of a request's images and videos; times in milliseconds.
type ImageUsage struct {
	Count    int      `json:"count"`
	Tokens   int      `json:"tokens"`
	Cached   int      `json:"cached,omitempty"`
	Sizes    [][2]int `json:"sizes,omitempty"`
	DecodeMs float64  `json:"decode_ms,omitempty"`
	ResizeMs float64  `json:"resize_ms,omitempty"`
	EngineMs float64  `json:"engine_ms,omitempty"`
}

// Speculation tells of a reply's rounds of speculation.
type Speculation struct {
	Rounds       int     `json:"rounds"`
	Drafted      int     `json:"drafted"`
	Accepted     int     `json:"accepted"`
	AcceptLength float64 `json:"accept_length"`
}

// Ended is the end of one of several replies.
type Ended struct {
	Reason           string `json:"reason"`
	CompletionTokens int    `json:"completion_tokens"`
	Stop             string `json:"stop,omitempty"`
}

// Done is the end of a generation: Reason is "stop", "length", "cancelled", "tool_calls", or a
// word of a newer daemon.
type Done struct {
	Reason      string       `json:"reason"`
	Usage       Usage        `json:"usage"`
	Images      *ImageUsage  `json:"images,omitempty"`
	Speculation *Speculation `json:"speculation,omitempty"`
	// Stop is the stop string that ended the reply.
	Stop    string  `json:"stop,omitempty"`
	Choices []Ended `json:"choices,omitempty"`
}

// Status tells what the daemon serves and does; PROTOCOL.md has the fields of Executor.
type Status struct {
	Server       string           `json:"server"`
	Model        string           `json:"model"`
	State        string           `json:"state"`
	Stage        string           `json:"stage,omitempty"`
	Share        *float64         `json:"share,omitempty"`
	Reason       string           `json:"reason,omitempty"`
	UptimeS      float64          `json:"uptime_s"`
	Clients      int              `json:"clients"`
	Running      int              `json:"running"`
	Queued       int              `json:"queued"`
	QueuedTokens int              `json:"queued_tokens"`
	Places       int              `json:"places,omitempty"`
	Totals       map[string]int64 `json:"totals,omitempty"`
	Engine       map[string]any   `json:"engine,omitempty"`
	Adapters     []string         `json:"adapters,omitempty"`
	Executor     map[string]any   `json:"executor,omitempty"`
}

type deltaAnswer struct {
	ID  string `json:"id"`
	Seq int64  `json:"seq"`
	Delta
}

type acceptedAnswer struct {
	ID string `json:"id"`
	Accepted
}

type doneAnswer struct {
	ID string `json:"id"`
	Done
}

type tokensAnswer struct {
	ID     string `json:"id"`
	Tokens []int  `json:"tokens"`
}

type textAnswer struct {
	ID   string `json:"id"`
	Text string `json:"text"`
}

type statusAnswer struct {
	ID string `json:"id"`
	Status
}

type leasedAnswer struct {
	Seconds float64 `json:"seconds"`
}

// kindsOfAnswers has, of each type of answer, a new one and the names of fields that it must have.
var kindsOfAnswers = map[string]struct {
	blank    func() any
	required []string
}{
	"welcome":  {func() any { return new(Welcome) }, []string{"proto", "server", "limits"}},
	"leased":   {func() any { return new(leasedAnswer) }, []string{"seconds"}},
	"accepted": {func() any { return new(acceptedAnswer) }, []string{"id", "prompt_tokens"}},
	"delta":    {func() any { return new(deltaAnswer) }, []string{"id", "seq", "text"}},
	"done":     {func() any { return new(doneAnswer) }, []string{"id", "reason", "usage"}},
	"error":    {func() any { return new(errorAnswer) }, []string{"code", "message"}},
	"tokens":   {func() any { return new(tokensAnswer) }, []string{"id", "tokens"}},
	"text":     {func() any { return new(textAnswer) }, []string{"id", "text"}},
	"status_report": {func() any { return new(statusAnswer) }, []string{
		"id", "server", "model", "state", "uptime_s", "clients", "running", "queued", "queued_tokens",
	}},
}

// decodeAnswer reads one frame. An answer of a type that is unknown here is nil.
func decodeAnswer(frame []byte) (any, error) {
	fields, err := scan(frame)
	if err != nil {
		return nil, err
	}
	if fields["t"] == nil {
		return nil, errors.New("an answer has no type")
	}
	kind, known := kindsOfAnswers[string(fields["t"])]
	if !known {
		return nil, nil
	}
	for _, name := range kind.required {
		if _, there := fields[name]; !there {
			return nil, fmt.Errorf("%s has no %s", fields["t"], name)
		}
	}
	answer := kind.blank()
	decoder := msgpack.GetDecoder()
	defer msgpack.PutDecoder(decoder)
	decoder.Reset(bytes.NewReader(frame))
	decoder.SetCustomStructTag("json")
	if err := decoder.Decode(answer); err != nil {
		return nil, err
	}
	return answer, nil
}

const (
	// The decoder has no bound of its own, and would end the program at the end of its stack. A schema in a request may be 64 deep.
	maxDepth = 128
	// A byte may become a struct of 90; an answer of 8 MiB has fewer values than that.
	maxValues = 1 << 22
)

var errCutShort = errors.New("a message is cut short")

// scan checks that data is one whole map of msgpack with text keys, and returns its fields but nil:
// a text as it is, another value as nil.
func scan(data []byte) (map[string][]byte, error) {
	s := scanner{data: data}
	fields := map[string][]byte{}
	kind, size, err := s.head()
	if err != nil {
		return nil, err
	}
	if kind != aMap {
		return nil, errors.New("a message is no map")
	}
	for ; size > 0; size-- {
		name, text, err := s.value(1)
		if err != nil {
			return nil, err
		}
		if name != aText {
			return nil, errors.New("a message has a key that is no text")
		}
		kind, value, err := s.value(1)
		if err != nil {
			return nil, err
		}
		if kind != aNil {
			fields[string(text)] = value
		}
	}
	if s.at != len(data) {
		return nil, errors.New("bytes follow a message")
	}
	return fields, nil
}

type valueKind int

const (
	aScalar valueKind = iota
	aNil
	aText
	aBinary
	anArray
	aMap
)

type scanner struct {
	data   []byte
	at     int
	values int
}

// value passes over one value at a depth, and returns its kind, and the bytes of a text.
func (s *scanner) value(depth int) (valueKind, []byte, error) {
	if depth > maxDepth {
		return 0, nil, errors.New("a message is nested too deep")
	}
	if s.values++; s.values > maxValues {
		return 0, nil, errors.New("a message has too many values")
	}
	kind, size, err := s.head()
	if err != nil {
		return 0, nil, err
	}
	if kind == aMap || kind == anArray {
		if kind == aMap {
			size *= 2
		}
		for ; size > 0; size-- {
			if _, _, err := s.value(depth + 1); err != nil {
				return 0, nil, err
			}
		}
		return kind, nil, nil
	}
	body := s.data[s.at : s.at+int(size)]
	s.at += int(size)
	if kind != aText {
		return kind, nil, nil
	}
	if !utf8.Valid(body) {
		return 0, nil, errors.New("a text is no UTF-8")
	}
	return kind, body, nil
}

// head reads the code of a value, and how many values or bytes follow. There are as many bytes at
// least: each value has one.
func (s *scanner) head() (kind valueKind, size uint64, err error) {
	if s.at == len(s.data) {
		return 0, 0, errCutShort
	}
	code := s.data[s.at]
	s.at++
	switch {
	case code < 0x80 || code >= 0xe0:
		return aScalar, 0, nil
	case code < 0x90:
		kind, size = aMap, uint64(code&0x0f)
	case code < 0xa0:
		kind, size = anArray, uint64(code&0x0f)
	case code < 0xc0:
		kind, size = aText, uint64(code&0x1f)
	case code == 0xc0:
		return aNil, 0, nil
	case code == 0xc1:
		return 0, 0, errors.New("a message has a reserved byte")
	default:
		form := forms[code-0xc2]
		kind, size = form.kind, form.bytes
		if form.width > 0 {
			if len(s.data)-s.at < form.width {
				return 0, 0, errCutShort
			}
			var wide [4]byte
			copy(wide[4-form.width:], s.data[s.at:])
			s.at += form.width
			size += uint64(binary.BigEndian.Uint32(wide[:]))
		}
	}
	if size > uint64(len(s.data)-s.at) {
		return 0, 0, errCutShort
	}
	return kind, size, nil
}

// forms of the codes from c2: the width of a size, and bytes beside those that it counts.
var forms = [...]struct {
	kind  valueKind
	width int
	bytes uint64
}{
	{aScalar, 0, 0}, {aScalar, 0, 0}, // false, true
	{aBinary, 1, 0}, {aBinary, 2, 0}, {aBinary, 4, 0},
	{aBinary, 1, 1}, {aBinary, 2, 1}, {aBinary, 4, 1}, // extensions, with their type
	{aScalar, 0, 4}, {aScalar, 0, 8}, // floats
	{aScalar, 0, 1}, {aScalar, 0, 2}, {aScalar, 0, 4}, {aScalar, 0, 8},
	{aScalar, 0, 1}, {aScalar, 0, 2}, {aScalar, 0, 4}, {aScalar, 0, 8},
	{aBinary, 0, 2}, {aBinary, 0, 3}, {aBinary, 0, 5}, {aBinary, 0, 9}, {aBinary, 0, 17},
	{aText, 1, 0}, {aText, 2, 0}, {aText, 4, 0},
	{anArray, 2, 0}, {anArray, 4, 0},
	{aMap, 2, 0}, {aMap, 4, 0},
}

// MarshalJSON writes the pair as PROTOCOL.md has it.
func (c TokenChance) MarshalJSON() ([]byte, error) {
	return json.Marshal([2]any{c.Token, c.Logprob})
}
