// Package zmtp is ZMTP 3 as a DEALER without keys speaks it to a ROUTER.
//
// See https://rfc.zeromq.org/spec/37/ and the appendix of PROTOCOL.md.
package zmtp

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	more, long, command = 1, 2, 4

	shortBytes = 255
	// Answers have 8 MiB at most; a peer that announces more than twice that is not a daemon.
	messageBytes = 16 << 20
	commandBytes = 4096
	// Frames of one message: the first, which alone is kept, and so many more.
	maxFrames = 1 + 1024
	// Commands that mean nothing here are dropped, so many of one peer.
	unknownCommands = 64
	// Sizes of a PING's time-to-live and of its context, which the PONG returns.
	waitBytes, contextBytes = 2, 16

	greetingBytes       = 64
	signedAt, majorAt   = 9, 10
	mechanismAt, asking = 12, 32
)

var (
	greeting = [greetingBytes]byte{
		0: 0xff, 8: 1, signedAt: 0x7f, majorAt: 3, 11: 1,
		mechanismAt: 'N', 'U', 'L', 'L',
	}
	ready = pack("READY", "\x0bSocket-Type\x00\x00\x00\x06DEALER")
)

// Violation is what a peer did against ZMTP or against the limits of this side.
type Violation string

func (v Violation) Error() string { return "zmtp: the peer " + string(v) }

// Conn is a connection behind its handshake. Read is for one goroutine, Write for any number.
type Conn struct {
	conn    net.Conn
	in      *bufio.Reader
	timeout atomic.Int64
	unknown int

	writing sync.Mutex
}

// Handshake greets the ROUTER behind conn, until the deadline that the caller has set for conn.
//
// Each later write, that of a PONG too, has timeout to leave. The error is a Violation, or conn's.
func Handshake(conn net.Conn, timeout time.Duration) (*Conn, error) {
	c := &Conn{conn: conn, in: bufio.NewReaderSize(conn, 1<<16)}
	c.timeout.Store(int64(timeout))
	if _, err := conn.Write(greeting[:]); err != nil {
		return nil, err
	}
	if err := c.greeted(); err != nil {
		return nil, err
	}
	if _, err := conn.Write(ready); err != nil {
		return nil, err
	}
	flags, size, err := c.head(0)
	if err != nil {
		return nil, err
	}
	if flags&command == 0 {
		return nil, Violation("sent a message before READY")
	}
	name, rest, err := c.command(size)
	if err != nil {
		return nil, err
	}
	if name != "READY" {
		return nil, Violation("sent another command before READY")
	}
	properties, err := propertiesOf(rest)
	if err != nil {
		return nil, err
	}
	if properties["socket-type"] != "ROUTER" {
		return nil, Violation("is not a ROUTER")
	}
	return c, nil
}

func (c *Conn) greeted() error {
	var theirs [greetingBytes]byte
	// Older versions have said all they will by here, and would be waited for.
	if _, err := io.ReadFull(c.in, theirs[:majorAt+1]); err != nil {
		return err
	}
	if theirs[0] != 0xff || theirs[signedAt]&1 == 0 || theirs[majorAt] < 3 {
		return Violation("does not speak ZMTP 3")
	}
	if _, err := io.ReadFull(c.in, theirs[majorAt+1:]); err != nil {
		return err
	}
	if string(theirs[mechanismAt:asking]) != string(greeting[mechanismAt:asking]) {
		return Violation("has a mechanism other than NULL")
	}
	return nil
}

// Read returns the first frame of the next message; further ones are dropped. PINGs are answered.
//
// The error is a Violation, or what reading gave.
func (c *Conn) Read() ([]byte, error) {
	var kept []byte
	for count, total := 0, uint64(0); ; {
		flags, size, err := c.head(total)
		if err != nil {
			return nil, err
		}
		if flags&command != 0 {
			if err := c.heed(size); err != nil {
				return nil, err
			}
			continue
		}
		if count++; count > maxFrames {
			return nil, Violation("sent a message of too many frames")
		}
		total += size
		if count == 1 {
			kept = make([]byte, size)
			_, err = io.ReadFull(c.in, kept)
		} else {
			_, err = io.CopyN(io.Discard, c.in, int64(size))
		}
		if err != nil {
			return nil, whole(err)
		}
		if flags&more == 0 {
			return kept, nil
		}
	}
}

// head returns flags and size of a frame, before which its message had total bytes.
func (c *Conn) head(total uint64) (flags byte, size uint64, err error) {
	var head [9]byte
	if _, err := io.ReadFull(c.in, head[:2]); err != nil {
		return 0, 0, err
	}
	flags, size = head[0], uint64(head[1])
	if flags&^(more|long|command) != 0 || flags&(more|command) == more|command {
		return 0, 0, Violation("sent a frame with flags that mean nothing")
	}
	if flags&long != 0 {
		if _, err := io.ReadFull(c.in, head[2:]); err != nil {
			return 0, 0, whole(err)
		}
		size = binary.BigEndian.Uint64(head[1:])
	}
	if flags&command != 0 && size > commandBytes {
		return 0, 0, Violation("sent too large a command")
	}
	// Neither operand is above 2^24 in the sum, so it cannot wrap.
	if size > messageBytes || total+size > messageBytes {
		return 0, 0, Violation(fmt.Sprintf("sent a message of more than %d bytes", messageBytes))
	}
	return flags, size, nil
}

func (c *Conn) command(size uint64) (name, rest string, err error) {
	body := make([]byte, size)
	if _, err := io.ReadFull(c.in, body); err != nil {
		return "", "", whole(err)
	}
	if size == 0 || body[0] == 0 || int(body[0]) >= len(body) {
		return "", "", Violation("sent a command without a name")
	}
	split := 1 + int(body[0])
	name, rest = string(body[1:split]), string(body[split:])
	if name == "ERROR" {
		return "", "", Violation(fmt.Sprintf("told of an error: %.255q", rest))
	}
	return name, rest, nil
}

func (c *Conn) heed(size uint64) error {
	name, rest, err := c.command(size)
	if err != nil {
		return err
	}
	if name == "PING" {
		if len(rest) < waitBytes || len(rest) > waitBytes+contextBytes {
			return Violation("sent a PING of a wrong size")
		}
		return c.write(net.Buffers{pack("PONG", rest[waitBytes:])})
	}
	if c.unknown++; c.unknown > unknownCommands {
		return Violation("sent too many commands that mean nothing here")
	}
	return nil
}

// Write sends one message of these frames. After an error the connection is of no more use.
func (c *Conn) Write(frames ...[]byte) error {
	buffers := make(net.Buffers, 0, 2*len(frames))
	for i, frame := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = more
		}
		buffers = append(buffers, header(flags, len(frame)), frame)
	}
	return c.write(buffers)
}

func (c *Conn) write(buffers net.Buffers) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	if err := c.conn.SetWriteDeadline(time.Now().Add(time.Duration(c.timeout.Load()))); err != nil {
		return err
	}
	_, err := buffers.WriteTo(c.conn)
	return err
}

// SetTimeout bounds writes from now on, the one in progress too.
func (c *Conn) SetTimeout(timeout time.Duration) {
	c.timeout.Store(int64(timeout))
	_ = c.conn.SetWriteDeadline(time.Now().Add(timeout))
}

// Close ends the connection at once.
func (c *Conn) Close() error { return c.conn.Close() }

func header(flags byte, size int) []byte {
	if size <= shortBytes {
		return []byte{flags, byte(size)}
	}
	return binary.BigEndian.AppendUint64([]byte{flags | long}, uint64(size))
}

func pack(name, rest string) []byte {
	body := string([]byte{byte(len(name))}) + name + rest
	return append(header(command, len(body)), body...)
}

// propertiesOf returns values by names in lower case, as these have no case.
func propertiesOf(data string) (map[string]string, error) {
	found := map[string]string{}
	for data != "" {
		name := int(data[0])
		if name == 0 || len(data) < 1+name+4 {
			return nil, Violation("sent properties that cannot be read")
		}
		value := data[1+name+4:]
		size := binary.BigEndian.Uint32([]byte(data[1+name : 1+name+4]))
		if uint64(size) > uint64(len(value)) {
			return nil, Violation("sent properties that cannot be read")
		}
		found[strings.ToLower(data[1:1+name])] = value[:size]
		data = value[size:]
	}
	return found, nil
}

// whole turns the end of a stream within a frame into the error that says so.
func whole(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
