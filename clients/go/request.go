package hearth

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/vmihailenco/msgpack/v5"
)

// Generate asks for text. Options that are nil or zero have the daemon's defaults; Ptr makes
// pointers of constants. PROTOCOL.md has the range of each.
type Generate struct {
	// Messages is a conversation, to which the model's template is applied.
	Messages []Message `json:"-"`
	// Prompt is raw text, in place of Messages.
	Prompt string `json:"-"`

	MaxTokens         *int     `json:"max_tokens,omitempty"`
	Temperature       *float64 `json:"temperature,omitempty"`
	TopK              *int     `json:"top_k,omitempty"`
	TopP              *float64 `json:"top_p,omitempty"`
	MinP              *float64 `json:"min_p,omitempty"`
	RepetitionPenalty *float64 `json:"repetition_penalty,omitempty"`
	PresencePenalty   float64  `json:"presence_penalty,omitempty"`
	FrequencyPenalty  float64  `json:"frequency_penalty,omitempty"`
	LogitBias         []Bias   `json:"logit_bias,omitempty"`
	Seed              *int64   `json:"seed,omitempty"`
	Stop              []string `json:"stop,omitempty"`
	Logprobs          *int     `json:"logprobs,omitempty"`
	IgnoreEOS         bool     `json:"ignore_eos,omitempty"`
	Priority          int      `json:"priority,omitempty"`
	// DeadlineS is the daemon's; the context of the call ends the request on this side.
	DeadlineS   *float64 `json:"deadline_s,omitempty"`
	Timestamps  bool     `json:"timestamps,omitempty"`
	Speculation *bool    `json:"speculation,omitempty"`
	Adapter     string   `json:"adapter,omitempty"`
	// Cache is "use", "bypass" or "pin".
	Cache           string  `json:"cache,omitempty"`
	CacheSalt       string  `json:"cache_salt,omitempty"`
	Traceparent     *string `json:"traceparent,omitempty"`
	ReasoningBudget *int    `json:"reasoning_budget,omitempty"`
	N               *int    `json:"n,omitempty"`

	Tools             []Tool         `json:"-"`
	ToolChoice        ToolChoice     `json:"-"`
	ParallelToolCalls *bool          `json:"parallel_tool_calls,omitempty"`
	Template          map[string]any `json:"-"`
	ResponseFormat    *Format        `json:"-"`

	// Extra has options of a newer daemon by their names; one that does not know them refuses them.
	Extra map[string]any `json:"-"`
}

// Tokenize asks for the token ids of Text, or of Messages with the template applied.
type Tokenize struct {
	Messages          []Message
	Text              string
	Tools             []Tool
	ToolChoice        ToolChoice
	ParallelToolCalls *bool
	Template          map[string]any
	Extra             map[string]any
}

// Message is one turn of a conversation.
type Message struct {
	// Role is "system", "developer", "user", "assistant" or "tool".
	Role string
	// Text is the turn's content, or else Parts are.
	Text  string
	Parts []Part
	// Reasoning and ToolCalls are the assistant's.
	Reasoning string
	ToolCalls []ToolCall
	// ToolCallID names the call that a turn of a tool answers.
	ToolCallID string
	Name       string
}

// ToolCall is a call of a tool by the model; Arguments is a JSON object.
type ToolCall struct {
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Arguments json.RawMessage `json:"arguments,omitempty"`
}

// Part is a piece of a turn: TextPart, Image or Video.
type Part interface {
	part(*frameList) (map[string]any, error)
}

// TextPart is text among pictures.
type TextPart string

// Image is a picture: a file with its Format ("jpeg", "png", "webp", "gif"), or raw pixels with
// their Encoding under ROS's name for it, Width, Height, and Step where bytes lie between rows.
// Data is sent as it is, and must not change until the request has been taken.
type Image struct {
	Data     []byte
	Format   string
	Encoding string
	Width    int
	Height   int
	Step     int
}

// Video is pictures in order.
type Video []VideoFrame

// VideoFrame is a picture at a time in seconds.
type VideoFrame struct {
	Image
	TimeS float64
}

// Tool is one that the model may call. Parameters is a JSON schema: a map, a json.RawMessage, or
// what else encoding/json makes an object of.
type Tool struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	Parameters  any    `json:"parameters,omitempty"`
	Strict      bool   `json:"strict,omitempty"`
}

// ToolChoice is ToolsAuto, ToolsNone, ToolsRequired, or ToolNamed.
type ToolChoice struct{ mode, name string }

// The choices of tools that name none. The zero value is the daemon's default, auto.
var (
	ToolsAuto     = ToolChoice{mode: "auto"}
	ToolsNone     = ToolChoice{mode: "none"}
	ToolsRequired = ToolChoice{mode: "required"}
)

// ToolNamed asks for exactly one call, of this tool.
func ToolNamed(name string) ToolChoice { return ToolChoice{name: name, mode: "named"} }

// Bias is added to the logit of a token.
type Bias struct {
	_msgpack struct{} `msgpack:",as_array"` // The encoder reads this.

	Token int
	Bias  float64
}

// Format is a form that an answer must have: Type is "json_object", "json_schema" (with Schema, as
// Parameters of a Tool, or a bool), "regex" (with Regex) or "lark" (with Grammar).
type Format struct {
	Type    string `json:"type"`
	Schema  any    `json:"schema,omitempty"`
	Regex   string `json:"regex,omitempty"`
	Grammar string `json:"grammar,omitempty"`
}

// Ptr returns a pointer to value, for options that have a default of their own.
func Ptr[T any](value T) *T { return &value }

// frameList collects the pictures of a message.
type frameList [][]byte

func (t TextPart) part(*frameList) (map[string]any, error) {
	return map[string]any{"type": "text", "text": string(t)}, nil
}

func (i Image) part(frames *frameList) (map[string]any, error) {
	says := i.says(frames)
	says["type"] = "image"
	return says, nil
}

func (i Image) says(frames *frameList) map[string]any {
	*frames = append(*frames, i.Data)
	says := map[string]any{"frame": len(*frames)}
	for name, value := range map[string]string{"format": i.Format, "encoding": i.Encoding} {
		if value != "" {
			says[name] = value
		}
	}
	for name, value := range map[string]int{"width": i.Width, "height": i.Height, "step": i.Step} {
		if value != 0 {
			says[name] = value
		}
	}
	return says
}

func (v Video) part(frames *frameList) (map[string]any, error) {
	shown := make([]any, len(v))
	for i, frame := range v {
		says := frame.says(frames)
		says["time_s"] = frame.TimeS
		shown[i] = says
	}
	return map[string]any{"type": "video", "frames": shown}, nil
}

// message is a request on the wire: its fields, and the frames of its pictures.
type message struct {
	data   []byte
	frames frameList
}

// conversation has the fields that generate and tokenize share.
type conversation struct {
	Messages   *[]any         `json:"messages,omitempty"`
	Tools      []any          `json:"tools,omitempty"`
	ToolChoice any            `json:"tool_choice,omitempty"`
	Template   map[string]any `json:"template,omitempty"`
}

func (g *Generate) encode(id string) (*message, error) {
	wire := struct {
		T      string  `json:"t"`
		ID     string  `json:"id"`
		Prompt *string `json:"prompt,omitempty"`
		conversation
		ResponseFormat any `json:"response_format,omitempty"`
		*Generate
	}{T: "generate", ID: id, Generate: g}
	if g.Prompt != "" || g.Messages == nil {
		wire.Prompt = &g.Prompt
	}
	var frames frameList
	var err error
	wire.conversation, err = converse(g.Messages, g.Tools, g.ToolChoice, g.Template, &frames)
	if err != nil {
		return nil, err
	}
	if g.ResponseFormat != nil {
		if wire.ResponseFormat, err = plain(g.ResponseFormat, "response_format"); err != nil {
			return nil, err
		}
	}
	data, err := encodeWith(&wire, g.Extra)
	return &message{data, frames}, err
}

func (q *Tokenize) encode(id string) (*message, error) {
	wire := struct {
		T    string  `json:"t"`
		ID   string  `json:"id"`
		Text *string `json:"text,omitempty"`
		conversation
		ParallelToolCalls *bool `json:"parallel_tool_calls,omitempty"`
	}{T: "tokenize", ID: id, ParallelToolCalls: q.ParallelToolCalls}
	if q.Text != "" || q.Messages == nil {
		wire.Text = &q.Text
	}
	var frames frameList
	var err error
	wire.conversation, err = converse(q.Messages, q.Tools, q.ToolChoice, q.Template, &frames)
	if err != nil {
		return nil, err
	}
	data, err := encodeWith(&wire, q.Extra)
	return &message{data, frames}, err
}

func converse(
	messages []Message, tools []Tool, choice ToolChoice, template map[string]any, frames *frameList,
) (wire conversation, err error) {
	if messages != nil {
		turns := make([]any, len(messages))
		for i := range messages {
			if turns[i], err = messages[i].turn(frames); err != nil {
				return wire, at(err, fmt.Sprintf("messages[%d]", i))
			}
		}
		wire.Messages = &turns
	}
	for i, tool := range tools {
		value, err := plain(tool, fmt.Sprintf("tools[%d]", i))
		if err != nil {
			return wire, err
		}
		wire.Tools = append(wire.Tools, value)
	}
	switch {
	case choice.name != "":
		wire.ToolChoice = map[string]any{"name": choice.name}
	case choice.mode != "":
		wire.ToolChoice = choice.mode
	}
	if len(template) > 0 {
		value, err := plain(template, "template")
		if err != nil {
			return wire, err
		}
		wire.Template = value.(map[string]any)
	}
	return wire, nil
}

func (m *Message) turn(frames *frameList) (map[string]any, error) {
	turn := map[string]any{"role": m.Role}
	switch {
	case m.Parts != nil:
		if m.Text != "" {
			return nil, failure(InvalidValue, "content", nil, "a turn has Text or Parts, not both")
		}
		parts := make([]any, len(m.Parts))
		for i, part := range m.Parts {
			value, err := part.part(frames)
			if err != nil {
				return nil, at(err, fmt.Sprintf("content[%d]", i))
			}
			parts[i] = value
		}
		turn["content"] = parts
	case m.Text != "" || len(m.ToolCalls) == 0:
		turn["content"] = m.Text
	}
	if m.Reasoning != "" {
		turn["reasoning"] = m.Reasoning
	}
	if len(m.ToolCalls) > 0 {
		calls, err := plain(m.ToolCalls, "tool_calls")
		if err != nil {
			return nil, err
		}
		turn["tool_calls"] = calls
	}
	if m.ToolCallID != "" {
		turn["tool_call_id"] = m.ToolCallID
	}
	if m.Name != "" {
		turn["name"] = m.Name
	}
	return turn, nil
}

// plain turns a value that encoding/json can write into maps, lists, text and numbers. Whole
// numbers stay whole, as a schema asks for some.
func plain(value any, field string) (any, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return nil, failure(InvalidValue, field, err, "%s is no JSON: %v", field, err)
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var found any
	if err := decoder.Decode(&found); err != nil {
		return nil, failure(InvalidValue, field, err, "%s is no JSON: %v", field, err)
	}
	return numbers(found, field)
}

func numbers(value any, field string) (_ any, err error) {
	switch value := value.(type) {
	case map[string]any:
		for name := range value {
			if value[name], err = numbers(value[name], field); err != nil {
				return nil, err
			}
		}
	case []any:
		for i := range value {
			if value[i], err = numbers(value[i], field); err != nil {
				return nil, err
			}
		}
	case json.Number:
		if !strings.ContainsAny(value.String(), ".eE") {
			if whole, err := value.Int64(); err == nil {
				return whole, nil
			}
		}
		number, err := value.Float64()
		if err != nil {
			return nil, failure(InvalidValue, field, err, "%s has a number that is too large", field)
		}
		return number, nil
	}
	return value, nil
}

func encode(value any) ([]byte, error) {
	var buffer bytes.Buffer
	encoder := msgpack.NewEncoder(&buffer)
	encoder.SetCustomStructTag("json")
	encoder.UseCompactInts(true)
	if err := encoder.Encode(value); err != nil {
		return nil, failure(InvalidValue, "", err, "the request cannot be encoded: %v", err)
	}
	return buffer.Bytes(), nil
}

// encodeWith encodes a struct, and behind its fields those of extra.
func encodeWith(wire any, extra map[string]any) ([]byte, error) {
	data, err := encode(wire)
	if err != nil {
		return nil, err
	}
	fields, err := scan(data)
	if err != nil {
		return nil, failure(InvalidValue, "", err, "the request cannot be sent: %v", err)
	}
	if len(extra) == 0 {
		return data, nil
	}
	for name := range extra {
		if _, there := fields[name]; there {
			return nil, failure(InvalidValue, name, nil, "Extra repeats the field %s", name)
		}
	}
	value, err := plain(extra, "Extra")
	if err != nil {
		return nil, err
	}
	more, err := encode(value)
	if err != nil {
		return nil, err
	}
	count := len(fields) + len(extra)
	whole := []byte{0xde, byte(count >> 8), byte(count)}
	return append(append(whole, data[mapHead(data):]...), more[mapHead(more):]...), nil
}

// mapHead is the size of the header before a map's fields.
func mapHead(data []byte) int {
	if data[0] == 0xde {
		return 3
	}
	return 1
}

// at puts a place before the field of an error.
func at(err error, place string) error {
	if e, ok := err.(*Error); ok {
		e.Field = place + "." + e.Field
	}
	return err
}
