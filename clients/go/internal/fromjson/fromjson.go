// Package fromjson reads requests in the form of the conformance suite: fields of PROTOCOL.md, with
// the bytes of pictures beside what is said of them.
package fromjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"hearth"
)

type generate struct {
	hearth.Generate
	conversation
	Prompt         string           `json:"prompt"`
	LogitBias      [][2]json.Number `json:"logit_bias"`
	ResponseFormat *hearth.Format   `json:"response_format"`
}

type tokenize struct {
	conversation
	Text              string `json:"text"`
	ParallelToolCalls *bool  `json:"parallel_tool_calls"`
}

type conversation struct {
	Messages   []turn          `json:"messages"`
	Tools      []hearth.Tool   `json:"tools"`
	ToolChoice json.RawMessage `json:"tool_choice"`
	Template   map[string]any  `json:"template"`
}

type turn struct {
	Role       string            `json:"role"`
	Content    json.RawMessage   `json:"content"`
	Reasoning  string            `json:"reasoning"`
	ToolCalls  []hearth.ToolCall `json:"tool_calls"`
	ToolCallID string            `json:"tool_call_id"`
	Name       string            `json:"name"`
}

type picture struct {
	Type     string  `json:"type"`
	Data     []byte  `json:"data"`
	Format   string  `json:"format"`
	Encoding string  `json:"encoding"`
	Width    int     `json:"width"`
	Height   int     `json:"height"`
	Step     int     `json:"step"`
	TimeS    float64 `json:"time_s"`

	Text   string    `json:"text"`
	Frames []picture `json:"frames"`
}

// Generate reads a request of `generate`.
func Generate(data []byte) (*hearth.Generate, error) {
	var given generate
	extra, err := split(data, &given)
	if err != nil {
		return nil, err
	}
	request := given.Generate
	request.Prompt, request.ResponseFormat = given.Prompt, given.ResponseFormat
	request.Tools, request.Template, request.Extra = given.conversation.Tools, given.conversation.Template, extra
	for _, pair := range given.LogitBias {
		token, err := pair[0].Int64()
		if err != nil {
			return nil, invalid("logit_bias", err)
		}
		bias, err := pair[1].Float64()
		if err != nil {
			return nil, invalid("logit_bias", err)
		}
		request.LogitBias = append(request.LogitBias, hearth.Bias{Token: int(token), Bias: bias})
	}
	request.Messages, request.ToolChoice, err = given.read()
	return &request, err
}

// Tokenize reads a request of `tokenize`.
func Tokenize(data []byte) (*hearth.Tokenize, error) {
	var given tokenize
	extra, err := split(data, &given)
	if err != nil {
		return nil, err
	}
	request := hearth.Tokenize{
		Text: given.Text, Tools: given.Tools, Template: given.Template,
		ParallelToolCalls: given.ParallelToolCalls, Extra: extra,
	}
	request.Messages, request.ToolChoice, err = given.read()
	return &request, err
}

func (c *conversation) read() (turns []hearth.Message, choice hearth.ToolChoice, err error) {
	if c.Messages != nil {
		turns = make([]hearth.Message, len(c.Messages))
	}
	for i, turn := range c.Messages {
		if turns[i], err = turn.read(); err != nil {
			return nil, choice, err
		}
	}
	if c.ToolChoice == nil {
		return turns, choice, nil
	}
	var mode string
	if json.Unmarshal(c.ToolChoice, &mode) == nil {
		known := map[string]hearth.ToolChoice{
			"auto": hearth.ToolsAuto, "none": hearth.ToolsNone, "required": hearth.ToolsRequired,
		}
		choice, there := known[mode]
		if !there {
			return nil, choice, invalid("tool_choice", fmt.Errorf("there is no choice %s", mode))
		}
		return turns, choice, nil
	}
	var named struct {
		Name string `json:"name"`
	}
	err = strict(c.ToolChoice, &named)
	return turns, hearth.ToolNamed(named.Name), err
}

func (t *turn) read() (hearth.Message, error) {
	message := hearth.Message{
		Role: t.Role, Reasoning: t.Reasoning, ToolCalls: t.ToolCalls, ToolCallID: t.ToolCallID,
		Name: t.Name,
	}
	if t.Content == nil || json.Unmarshal(t.Content, &message.Text) == nil {
		return message, nil
	}
	var given []picture
	if err := strict(t.Content, &given); err != nil {
		return message, err
	}
	message.Parts = []hearth.Part{}
	for _, one := range given {
		switch one.Type {
		case "text":
			message.Parts = append(message.Parts, hearth.TextPart(one.Text))
		case "image":
			message.Parts = append(message.Parts, one.image())
		case "video":
			video := hearth.Video{}
			for _, frame := range one.Frames {
				video = append(video, hearth.VideoFrame{Image: frame.image(), TimeS: frame.TimeS})
			}
			message.Parts = append(message.Parts, video)
		default:
			return message, invalid("type", fmt.Errorf("there is no part %s", one.Type))
		}
	}
	return message, nil
}

func (p *picture) image() hearth.Image {
	return hearth.Image{
		Data: p.Data, Format: p.Format, Encoding: p.Encoding,
		Width: p.Width, Height: p.Height, Step: p.Step,
	}
}

// split reads the fields that request has, and returns the others.
func split(data []byte, request any) (map[string]any, error) {
	var given map[string]json.RawMessage
	if err := json.Unmarshal(data, &given); err != nil {
		return nil, invalid("", err)
	}
	known := names(reflect.TypeOf(request).Elem())
	var extra map[string]any
	for name, text := range given {
		if known[name] {
			continue
		}
		delete(given, name)
		var value any
		if err := strict(text, &value); err != nil {
			return nil, err
		}
		if extra == nil {
			extra = map[string]any{}
		}
		extra[name] = value
	}
	rest, err := json.Marshal(given)
	if err != nil {
		return nil, err
	}
	return extra, strict(rest, request)
}

func names(kind reflect.Type) map[string]bool {
	found := map[string]bool{}
	for i := 0; i < kind.NumField(); i++ {
		field := kind.Field(i)
		if field.Anonymous {
			for name := range names(field.Type) {
				found[name] = true
			}
		}
		name := strings.Split(field.Tag.Get("json"), ",")[0]
		if name != "" && name != "-" {
			found[name] = true
		}
	}
	return found
}

func strict(data []byte, value any) error {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	decoder.DisallowUnknownFields()
	err := decoder.Decode(value)
	if err == nil {
		return nil
	}
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		return invalid(wrong.Field, err)
	}
	if rest := strings.TrimPrefix(err.Error(), "json: unknown field "); rest != err.Error() {
		return &hearth.Error{
			Code: hearth.UnsupportedOption, Message: err.Error(), Field: strings.Trim(rest, `"`),
		}
	}
	return invalid("", err)
}

func invalid(field string, err error) error {
	return &hearth.Error{Code: hearth.InvalidValue, Message: err.Error(), Field: field}
}
