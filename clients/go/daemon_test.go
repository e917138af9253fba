package hearth_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"hearth"
)

// patience is far more than anything here takes: it ends a test that would wait for ever.
const patience = 20 * time.Second

// daemon is a ROUTER that says what a test tells it.
type daemon struct {
	tb       testing.TB
	path     string
	listener net.Listener
}

// peer is one connection of a client, seen from the daemon.
type peer struct {
	net.Conn
	tb testing.TB
	in *bufio.Reader
}

type fields map[string]any

func newDaemon(tb testing.TB) *daemon {
	tb.Helper()
	d := &daemon{tb: tb, path: filepath.Join(tb.TempDir(), "s")}
	d.listen()
	tb.Cleanup(func() { _ = d.listener.Close() })
	return d
}

func (d *daemon) listen() {
	d.tb.Helper()
	listener, err := net.Listen("unix", d.path)
	if err != nil {
		d.tb.Fatal(err)
	}
	d.listener = listener
}

// accept takes the next connection and shakes hands on it.
func (d *daemon) accept() *peer {
	d.tb.Helper()
	conn, err := d.listener.Accept()
	if err != nil {
		d.tb.Fatal(err)
	}
	d.tb.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(patience))
	p := &peer{Conn: conn, tb: d.tb, in: bufio.NewReader(conn)}
	greeting := make([]byte, 64)
	copy(greeting, "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL")
	p.write(string(greeting) + "\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER")
	if _, err := io.CopyN(io.Discard, p.in, 64); err != nil {
		d.tb.Fatal(err)
	}
	p.frame()
	return p
}

// meet takes the next connection and opens a session on it.
func (d *daemon) meet(changes fields) *peer {
	d.tb.Helper()
	p := d.accept()
	if hello := p.receive(); hello["t"] != "hello" {
		d.tb.Fatalf("%v came first", hello)
	}
	p.send(welcome(changes))
	return p
}

func welcome(changes fields) fields {
	limits := fields{
		"frame_bytes": 1 << 20, "frames": 1, "requests_per_client": 64, "prompt_tokens": 100,
		"total_tokens": 200, "queued_requests": 9, "queued_tokens": 999, "lease_s": 3600.0,
	}
	answer := fields{"t": "welcome", "proto": 1, "server": "test", "epoch": "a", "limits": limits}
	for name, value := range changes {
		if _, limit := limits[name]; limit || name == "images" || name == "image_bytes" ||
			name == "request_image_bytes" {
			limits[name] = value
		} else {
			answer[name] = value
		}
	}
	return answer
}

func (p *peer) write(data string) {
	if _, err := io.WriteString(p, data); err != nil {
		p.tb.Error(err)
	}
}

func (p *peer) frame() (flags byte, body []byte) {
	p.tb.Helper()
	head := make([]byte, 9)
	_, err := io.ReadFull(p.in, head[:2])
	size := uint64(head[1])
	if err == nil && head[0]&2 != 0 {
		_, err = io.ReadFull(p.in, head[2:])
		size = binary.BigEndian.Uint64(head[1:])
	}
	body = make([]byte, size)
	if err == nil {
		_, err = io.ReadFull(p.in, body)
	}
	if err != nil {
		p.tb.Fatal("a client has gone:", err)
	}
	return head[0], body
}

// receive returns the next message; the frames of its pictures are its field "frames".
func (p *peer) receive() fields {
	p.tb.Helper()
	flags, body := p.frame()
	message := fields(unpacked(p.tb, body).(map[string]any))
	var frames [][]byte
	for flags&1 != 0 {
		flags, body = p.frame()
		frames = append(frames, body)
	}
	if frames != nil {
		message["frames"] = frames
	}
	return message
}

// expect returns the next message but leases, which has to be of this type.
func (p *peer) expect(kind string) fields {
	p.tb.Helper()
	message := p.receive()
	for kind != "lease" && message["t"] == "lease" {
		message = p.receive()
	}
	if message["t"] != kind {
		p.tb.Fatalf("%v came, not %s", message, kind)
	}
	return message
}

func (p *peer) send(answers ...fields) {
	p.tb.Helper()
	for _, answer := range answers {
		data, err := msgpack.Marshal(answer)
		if err != nil {
			p.tb.Fatal(err)
		}
		p.sendBytes(data)
	}
}

func (p *peer) sendBytes(data []byte) {
	p.write(string(binary.BigEndian.AppendUint64([]byte{2}, uint64(len(data)))) + string(data))
}

func accepted(id any) fields { return fields{"t": "accepted", "id": id, "prompt_tokens": 3} }

func delta(id any, seq int, text string) fields {
	return fields{"t": "delta", "id": id, "seq": seq, "text": text}
}

func done(id any, reason string) fields {
	usage := fields{"prompt_tokens": 3, "completion_tokens": 1}
	return fields{"t": "done", "id": id, "reason": reason, "usage": usage}
}

func failed(id any, code string) fields {
	return fields{"t": "error", "id": id, "code": code, "message": "It failed."}
}

// dial connects a client, and returns its side of the daemon too.
func dial(
	t *testing.T, d *daemon, options hearth.Options, changes fields,
) (*hearth.Client, *peer) {
	t.Helper()
	options.Address = d.path
	met := make(chan *peer, 1)
	go func() { met <- d.meet(changes) }()
	client, err := hearth.Dial(within(t), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client, <-met
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func generate(t *testing.T, client *hearth.Client) *hearth.Stream {
	t.Helper()
	return generateIn(within(t), t, client)
}

func generateIn(ctx context.Context, t *testing.T, client *hearth.Client) *hearth.Stream {
	t.Helper()
	stream, err := client.Generate(ctx, &hearth.Generate{Prompt: "a"})
	if err != nil {
		t.Fatal(err)
	}
	return stream
}
