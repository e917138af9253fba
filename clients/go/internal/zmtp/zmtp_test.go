package zmtp

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

const (
	routersReady = "\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
	vectorsFile  = "../../../vectors/zmtp.json"
)

type vector struct {
	Name, From, Hex, After, Close string

	Means struct {
		Command  string
		Message  []string
		Greeting map[string]any
	}
}

// peer is a connection from which bytes come, and then the end; what is written to it is kept.
type peer struct {
	net.Conn
	io.Reader
	wrote bytes.Buffer
}

func (p *peer) Read(into []byte) (int, error)    { return p.Reader.Read(into) }
func (p *peer) Write(data []byte) (int, error)   { return p.wrote.Write(data) }
func (p *peer) SetWriteDeadline(time.Time) error { return nil }

func shake(tb testing.TB, first, then []byte) (*Conn, *peer, error) {
	tb.Helper()
	p := &peer{Reader: io.MultiReader(bytes.NewReader(first), bytes.NewReader(then))}
	c, err := Handshake(p, time.Minute)
	p.wrote.Reset()
	return c, p, err
}

func introduced() []byte { return append(greeting[:], routersReady...) }

func vectors(tb testing.TB) []vector {
	tb.Helper()
	text, err := os.ReadFile(vectorsFile)
	if err != nil {
		tb.Fatal(err)
	}
	var found []vector
	if err := json.Unmarshal(text, &found); err != nil || len(found) == 0 {
		tb.Fatal("the vectors cannot be read", err)
	}
	return found
}

func unhex(tb testing.TB, text string) []byte {
	tb.Helper()
	data, err := hex.DecodeString(text)
	if err != nil {
		tb.Fatal(err)
	}
	return data
}

func TestVectors(t *testing.T) {
	for _, v := range vectors(t) {
		data := unhex(t, v.Hex)
		t.Run(v.Name, func(t *testing.T) {
			switch {
			case v.Close != "":
				refused(t, v.After, data)
			case v.From == "client":
				written(t, v, data)
			case v.Means.Greeting != nil:
				if _, _, err := shake(t, data, []byte(routersReady)); err != nil {
					t.Fatal(err)
				}
			case v.Means.Command == "READY":
				if _, _, err := shake(t, greeting[:], data); err != nil {
					t.Fatal(err)
				}
			case v.Means.Command == "PING":
				c, p, _ := shake(t, introduced(), data)
				if _, err := c.Read(); !errors.Is(err, io.EOF) {
					t.Fatal(err)
				}
				if want := pack("PONG", string(data[9:])); !bytes.Equal(p.wrote.Bytes(), want) {
					t.Fatalf("%q answers it, not %q", p.wrote.Bytes(), want)
				}
			case v.Means.Command == "ERROR":
				refused(t, "ready", data)
			case v.Means.Command != "":
				c, _, _ := shake(t, introduced(), data)
				if _, err := c.Read(); !errors.Is(err, io.EOF) {
					t.Fatal(err)
				}
			default:
				c, _, _ := shake(t, introduced(), data)
				frame, err := c.Read()
				if err != nil || !bytes.Equal(frame, unhex(t, v.Means.Message[0])) {
					t.Fatalf("%x came, and %v", frame, err)
				}
			}
		})
	}
}

// refused gives bytes of a daemon behind others, and wants a Violation.
func refused(t *testing.T, after string, data []byte) {
	t.Helper()
	before := map[string][]byte{"nothing": nil, "greeting": greeting[:], "ready": introduced()}
	c, _, err := shake(t, before[after], data)
	if after == "ready" {
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.Read()
	}
	var violation Violation
	if !errors.As(err, &violation) {
		t.Fatalf("%v is no violation", err)
	}
}

// written compares what this side writes with the bytes of a client.
func written(t *testing.T, v vector, want []byte) {
	t.Helper()
	var got []byte
	switch {
	case v.Means.Greeting != nil:
		got = greeting[:]
	case v.Means.Command == "READY":
		got = ready
	case v.Means.Command == "PONG":
		got = pack("PONG", string(want[7:]))
	case v.Means.Command != "":
		return // This side sends no PING.
	default:
		c, p, _ := shake(t, introduced(), nil)
		frames := make([][]byte, len(v.Means.Message))
		for i, text := range v.Means.Message {
			frames[i] = unhex(t, text)
		}
		if err := c.Write(frames...); err != nil {
			t.Fatal(err)
		}
		got = p.wrote.Bytes()
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%x is written, not %x", got, want)
	}
}

func TestAFrameThatEndsEarlyIsCutShort(t *testing.T) {
	for _, data := range []string{"\x00", "\x00\x05abc", "\x02\x00\x00", "\x01\x01a\x00\x02b", "\x04\x05"} {
		c, _, _ := shake(t, introduced(), []byte(data))
		if _, err := c.Read(); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%q: %v", data, err)
		}
	}
}

func FuzzRead(f *testing.F) {
	for _, v := range vectors(f) {
		f.Add(unhex(f, v.Hex))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if _, _, err := shake(t, data, nil); err == nil && len(data) < greetingBytes {
			t.Fatal("a greeting of fewer bytes was taken")
		}
		c, _, err := shake(t, introduced(), data)
		if err != nil {
			t.Fatal(err)
		}
		for read := 0; ; {
			frame, err := c.Read()
			if err != nil {
				return
			}
			if read += len(frame); read > len(data) {
				t.Fatalf("%d bytes came of %d", read, len(data))
			}
		}
	})
}
