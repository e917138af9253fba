// Command hearth-driver speaks the contract of clients/conformance: JSON lines in, JSON lines out.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"sync"
	"time"

	"hearth"
	"hearth/internal/fromjson"
)

const lineBytes = 64 << 20

type command struct {
	Do       string          `json:"do"`
	As       string          `json:"as"`
	Request  json.RawMessage `json:"request"`
	Read     *bool           `json:"read"`
	TimeoutS float64         `json:"timeout_s"`
	SilenceS float64         `json:"silence_s"`
	LeaseS   float64         `json:"lease_s"`
	Features []string        `json:"features"`
	Name     string          `json:"name"`
}

type driver struct {
	address string
	options hearth.Options
	client  *hearth.Client
	running sync.WaitGroup
	streams map[string]*running

	mu  sync.Mutex
	out *json.Encoder
}

type running struct {
	stream *hearth.Stream
	start  chan struct{}
	once   sync.Once
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: hearth-driver ADDRESS")
		os.Exit(2)
	}
	d := &driver{
		address: os.Args[1], streams: map[string]*running{}, out: json.NewEncoder(os.Stdout),
	}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, lineBytes)
	for lines.Scan() {
		var c command
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			fmt.Fprintln(os.Stderr, "a command cannot be read:", err)
			os.Exit(2)
		}
		if c.Do == "close" {
			break
		}
		d.do(&c)
	}
	if d.client != nil {
		_ = d.client.Close()
	}
	for _, one := range d.streams {
		one.read()
	}
	d.running.Wait()
	d.emit("closed", "", nil)
}

func (d *driver) do(c *command) {
	ctx := context.Background()
	switch c.Do {
	case "connect":
		d.connect(ctx, c)
	case "read":
		if one := d.streams[c.As]; one != nil {
			one.read()
		}
	case "cancel":
		if one := d.streams[c.As]; one != nil {
			one.stream.Cancel()
		}
	case "generate":
		request, err := fromjson.Generate(c.Request)
		if err == nil {
			err = d.generate(ctx, c, request)
		}
		if err != nil {
			d.failed(c.As, err)
		}
	case "tokenize":
		d.ask(c.As, func() (string, any, error) {
			request, err := fromjson.Tokenize(c.Request)
			if err != nil {
				return "", nil, err
			}
			tokens, err := d.client.Tokenize(ctx, request)
			return "tokens", map[string]any{"tokens": tokens}, err
		})
	case "detokenize":
		d.ask(c.As, func() (string, any, error) {
			var request struct {
				Tokens []int `json:"tokens"`
			}
			if err := json.Unmarshal(c.Request, &request); err != nil {
				return "", nil, err
			}
			text, err := d.client.Detokenize(ctx, request.Tokens)
			return "text", map[string]any{"text": text}, err
		})
	case "status":
		d.ask(c.As, func() (string, any, error) {
			status, err := d.client.Status(ctx)
			return "status_report", status, err
		})
	default:
		fmt.Fprintln(os.Stderr, "there is no command", c.Do)
		os.Exit(2)
	}
}

// connect opens a session: with the client that there is, where it would have the same options.
func (d *driver) connect(ctx context.Context, c *command) {
	options := hearth.Options{
		Address: d.address, Name: c.Name, Features: c.Features,
		Timeout: seconds(c.TimeoutS), Silence: seconds(c.SilenceS), Lease: seconds(c.LeaseS),
	}
	if d.client != nil && !reflect.DeepEqual(options, d.options) {
		_ = d.client.Close()
		d.client = nil
	}
	if d.client == nil {
		client, err := hearth.Dial(ctx, options)
		if err != nil {
			d.failed("", err)
			return
		}
		d.client, d.options = client, options
	}
	welcome, err := d.client.Connect(ctx)
	if err != nil {
		d.failed("", err)
		return
	}
	d.emit("connected", "", map[string]any{"welcome": welcome})
}

func (d *driver) generate(ctx context.Context, c *command, request *hearth.Generate) error {
	if d.client == nil {
		return notConnected()
	}
	stream, err := d.client.Generate(ctx, request)
	if err != nil {
		return err
	}
	one := &running{stream: stream, start: make(chan struct{})}
	if c.Read == nil || *c.Read {
		one.read()
	}
	d.streams[c.As] = one
	d.running.Add(1)
	go func() {
		defer d.running.Done()
		<-one.start
		d.follow(c.As, stream)
	}()
	return nil
}

func (d *driver) follow(as string, stream *hearth.Stream) {
	if accepted, err := stream.Accepted(); err == nil && accepted != nil {
		d.emit("accepted", as, accepted)
	}
	for stream.Next() {
		d.emit("delta", as, stream.Delta())
	}
	if err := stream.Err(); err != nil {
		d.failed(as, err)
		return
	}
	d.emit("done", as, stream.Done())
}

func (d *driver) ask(as string, question func() (event string, fields any, err error)) {
	if d.client == nil {
		d.failed(as, notConnected())
		return
	}
	d.running.Add(1)
	go func() {
		defer d.running.Done()
		event, fields, err := question()
		if err != nil {
			d.failed(as, err)
			return
		}
		d.emit(event, as, fields)
	}()
}

func (d *driver) failed(as string, err error) {
	var known *hearth.Error
	if !errors.As(err, &known) {
		d.emit("failed", as, map[string]any{
			"code": "invalid_value", "message": err.Error(), "kind": "client",
		})
		return
	}
	fields := map[string]any{
		"code": known.Code, "message": known.Message, "kind": known.Kind(), "field": known.Field,
	}
	if known.RetryAfter > 0 {
		fields["retry_after_s"] = known.RetryAfter.Seconds()
	}
	if known.Usage != nil {
		fields["usage"] = known.Usage
	}
	d.emit("failed", as, fields)
}

// emit writes one event: what fields has as JSON, and its name.
func (d *driver) emit(event, as string, fields any) {
	line := map[string]any{}
	if fields != nil {
		text, err := json.Marshal(fields)
		if err == nil {
			err = json.Unmarshal(text, &line)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "an event cannot be written:", err)
			os.Exit(2)
		}
	}
	line["event"] = event
	if as != "" {
		line["as"] = as
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.out.Encode(line); err != nil {
		os.Exit(1)
	}
}

func (r *running) read() { r.once.Do(func() { close(r.start) }) }

func notConnected() error {
	return &hearth.Error{Code: hearth.ClientClosed, Message: "there is no session: connect first"}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
