package hearth_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"hearth"
)

func wants(t *testing.T, err error, code hearth.Code) {
	t.Helper()
	if !errors.Is(err, code) {
		t.Fatalf("%v is not %s", err, code)
	}
}

func TestTheConversationOfTheDocument(t *testing.T) {
	d := newDaemon(t)
	lines := vectors(t, "conversation")
	served := make(chan struct{})
	go func() {
		defer close(served)
		p := d.accept()
		for _, line := range lines {
			if line.From == "server" {
				p.sendBytes(unhex(t, line.Hex))
				continue
			}
			got, want := p.receive(), unpacked(t, unhex(t, line.Hex))
			if !reflect.DeepEqual(map[string]any(got), want) {
				t.Errorf("%v came, not %v", got, want)
			}
		}
	}()
	client, err := hearth.Dial(within(t), hearth.Options{
		Address: "ipc://" + d.path, Name: "demo", Features: []string{},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	stream, err := client.Generate(within(t), &hearth.Generate{
		Messages: []hearth.Message{{Role: "user", Text: "Lamp on"}}, MaxTokens: hearth.Ptr(8),
	})
	if err != nil {
		t.Fatal(err)
	}
	replies, err := stream.Collect()
	if err != nil || len(replies) != 1 || replies[0].Text != "Done." {
		t.Fatalf("%v came, and %v", replies, err)
	}
	if reason := stream.Done().Reason; reason != "stop" {
		t.Fatal(reason)
	}
	if queued, err := stream.Accepted(); err != nil || queued.Request != "b09922ff-17" {
		t.Fatal(queued, err)
	}
	<-served
}

func TestRequestsWithOneAnswer(t *testing.T) {
	client, p := dial(t, newDaemon(t), hearth.Options{}, nil)
	go func() {
		id := p.expect("tokenize")["id"]
		p.send(fields{"t": "tokens", "id": id, "tokens": []int{1, 70000}})
		id = p.expect("detokenize")["id"]
		p.send(fields{"t": "text", "id": id, "text": "é"})
		id = p.expect("status")["id"]
		p.send(fields{
			"t": "status_report", "id": id, "server": "s", "model": "m", "state": "pondering",
			"uptime_s": 3, "clients": 1, "running": 0, "queued": 0, "queued_tokens": 0,
			"engine": fields{"layers": 3, "dtype": "float32"},
		})
	}()
	tokens, err := client.Tokenize(within(t), &hearth.Tokenize{Text: "a"})
	if err != nil || !reflect.DeepEqual(tokens, []int{1, 70000}) {
		t.Fatal(tokens, err)
	}
	text, err := client.Detokenize(within(t), nil)
	if err != nil || text != "é" {
		t.Fatal(text, err)
	}
	status, err := client.Status(within(t))
	if err != nil || status.State != "pondering" || status.Engine["dtype"] != "float32" {
		t.Fatal(status, err)
	}
}

func TestNobodyListens(t *testing.T) {
	d := newDaemon(t)
	_ = d.listener.Close()
	_, err := hearth.Dial(within(t), hearth.Options{Address: d.path})
	wants(t, err, hearth.ConnectionRefused)
	if !errors.Is(err, hearth.KindConnection) || errors.Is(err, hearth.KindService) {
		t.Fatal(err)
	}
}

func TestAddressesThatAreNone(t *testing.T) {
	for _, address := range []string{"tcp://127.0.0.1:7", "/" + strings.Repeat("a", 107)} {
		_, err := hearth.Dial(within(t), hearth.Options{Address: address})
		wants(t, err, hearth.InvalidValue)
	}
}

func TestADaemonThatSaysNothing(t *testing.T) {
	d := newDaemon(t)
	_, err := hearth.Dial(within(t), hearth.Options{Address: d.path, Timeout: time.Millisecond})
	wants(t, err, hearth.ConnectionTimeout)

	d = newDaemon(t)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		d.accept().expect("hello")
		cancel()
	}()
	if _, err = hearth.Dial(ctx, hearth.Options{Address: d.path}); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

func TestHellosThatAreRefused(t *testing.T) {
	for _, code := range []string{"too_many_clients", "unsupported_protocol", "of_a_later_daemon"} {
		d := newDaemon(t)
		go func() {
			p := d.accept()
			p.expect("hello")
			p.send(failed("", "hello_required"), fields{"t": "leased", "seconds": 1}, failed("", code))
		}()
		_, err := hearth.Dial(within(t), hearth.Options{Address: d.path})
		wants(t, err, hearth.Code(code))
	}
}

func TestADaemonOfTheFirstVersionRefusesFeatures(t *testing.T) {
	d := newDaemon(t)
	again := make(chan fields, 1)
	go func() {
		p := d.accept()
		p.expect("hello")
		refusal := failed("", "unsupported_option")
		refusal["field"] = "features"
		p.send(refusal)
		again <- p.expect("hello")
		p.send(welcome(nil))
	}()
	client, err := hearth.Dial(within(t), hearth.Options{Address: d.path, Lease: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if hello := <-again; hello["features"] != nil || hello["lease_s"] != int64(60) {
		t.Fatal(hello)
	}
}

func TestErrorsOfRequests(t *testing.T) {
	client, p := dial(t, newDaemon(t), hearth.Options{}, nil)
	for code, kind := range map[string]hearth.Kind{
		"prompt_too_long": hearth.KindRequest, "queue_full": hearth.KindService,
		"of_a_later_daemon": hearth.KindService,
	} {
		stream := generate(t, client)
		answer := failed(p.expect("generate")["id"], code)
		answer["retry_after_s"], answer["field"] = 1.5, "prompt"
		p.send(answer)
		if stream.Next() {
			t.Fatal("a delta came")
		}
		var failure *hearth.Error
		if !errors.As(stream.Err(), &failure) || failure.Kind() != kind || failure.Field != "prompt" ||
			failure.RetryAfter != 1500*time.Millisecond || stream.Done() != nil {
			t.Fatalf("%v", stream.Err())
		}
		wants(t, stream.Err(), hearth.Code(code))
		if _, err := stream.Accepted(); !errors.Is(err, hearth.Code(code)) {
			t.Fatal(err)
		}
	}
}

func TestLateAndUnknownAnswersAreIgnored(t *testing.T) {
	client, p := dial(t, newDaemon(t), hearth.Options{}, nil)
	stream := generate(t, client)
	id := p.expect("generate")["id"]
	later := delta(id, 0, "a")
	later["mood"] = []any{fields{"x": nil}}
	p.send(
		fields{"t": "weather", "id": id, "text": 5}, failed("", "queue_full"), accepted(id), later,
		delta("99", 7, "b"), done("99", "stop"), done(id, "tired"),
		delta(id, 1, "late"), failed(id, "internal"), done(id, "stop"),
	)
	replies, err := stream.Collect()
	if err != nil || replies[0].Text != "a" || stream.Done().Reason != "tired" {
		t.Fatal(replies, err, stream.Done())
	}
	if _, err := client.Connect(within(t)); err != nil {
		t.Fatal(err)
	}
}

func TestAnswersThatBreakARequest(t *testing.T) {
	for name, answer := range map[string]fields{
		"a lost delta":     delta("1", 1, "b"),
		"a repeated one":   delta("1", -1, "b"),
		"another question": {"t": "tokens", "id": "1", "tokens": []int{}},
	} {
		t.Run(name, func(t *testing.T) {
			client, p := dial(t, newDaemon(t), hearth.Options{}, nil)
			stream := generate(t, client)
			p.expect("generate")
			p.send(answer)
			_, err := stream.Collect()
			wants(t, err, hearth.ProtocolViolation)
			other := generate(t, client)
			p.expect("generate")
			p.send(done("2", "stop"))
			if _, err := other.Collect(); err != nil {
				t.Fatal("the session went with it:", err)
			}
		})
	}
}

func TestWhatEndsASession(t *testing.T) {
	for name, one := range map[string]struct {
		do   func(p *peer)
		code hearth.Code
	}{
		"the end":        {func(p *peer) { _ = p.Close() }, hearth.ConnectionLost},
		"hello required": {func(p *peer) { p.send(failed("", "hello_required")) }, hearth.ConnectionLost},
		"hello required by one": {
			func(p *peer) { p.send(failed("1", "hello_required")) }, hearth.ConnectionLost,
		},
		"lease expired":      {func(p *peer) { p.send(failed("", "lease_expired")) }, hearth.LeaseExpired},
		"another epoch":      {func(p *peer) { p.send(welcome(fields{"epoch": "b"})) }, hearth.ConnectionLost},
		"bytes":              {func(p *peer) { p.sendBytes([]byte("\xc1")) }, hearth.ProtocolViolation},
		"a wrong type":       {func(p *peer) { p.send(fields{"t": "leased", "seconds": "x"}) }, hearth.ProtocolViolation},
		"no seq":             {func(p *peer) { p.send(fields{"t": "delta", "id": "1", "text": ""}) }, hearth.ProtocolViolation},
		"flags of no frame":  {func(p *peer) { p.write("\x80\x00") }, hearth.ProtocolViolation},
		"a frame of 2^63":    {func(p *peer) { p.write("\x02\x80\x00\x00\x00\x00\x00\x00\x00") }, hearth.ProtocolViolation},
		"a frame cut short":  {func(p *peer) { p.write("\x00\x09a"); _ = p.Close() }, hearth.ConnectionLost},
		"no answer any more": {func(*peer) {}, hearth.ConnectionTimeout},
	} {
		one := one
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDaemon(t)
			options := hearth.Options{Silence: patience}
			if one.code == hearth.ConnectionTimeout {
				options.Silence = 300 * time.Millisecond
			}
			client, p := dial(t, d, options, nil)
			streams := []*hearth.Stream{generate(t, client), generate(t, client)}
			p.expect("generate")
			p.expect("generate")
			p.send(delta("1", 0, "so far"))
			one.do(p)
			for i, stream := range streams {
				replies, err := stream.Collect()
				wants(t, err, one.code)
				if i == 0 && replies[0].Text != "so far" {
					t.Fatal("what had come is lost")
				}
			}
			next := make(chan any)
			go func() { next <- d.meet(nil).expect("status")["id"] }()
			go func() { _, _ = client.Status(within(t)) }()
			if id := <-next; id != "3" {
				t.Fatal("the next session has an id of the last one:", id)
			}
		})
	}
}

func TestADaemonThatComesBackIsWaitedFor(t *testing.T) {
	d := newDaemon(t)
	client, p := dial(t, d, hearth.Options{Timeout: patience}, nil)
	stream := generate(t, client)
	_ = d.listener.Close()
	_ = p.Close()
	_, err := stream.Collect()
	wants(t, err, hearth.ConnectionLost)
	connected := make(chan error)
	go func() {
		_, err := client.Connect(within(t))
		connected <- err
	}()
	d.listen()
	d.meet(nil)
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
}

func TestTheLeaseIsKeptByTheClock(t *testing.T) {
	client, p := dial(t, newDaemon(t), hearth.Options{}, fields{"lease_s": 0.003})
	stream := generate(t, client)
	p.expect("generate")
	for seq := 0; seq < 5; seq++ {
		p.send(delta("1", seq, "a"))
		p.expect("lease")
	}
	p.send(done("1", "stop"))
	if replies, err := stream.Collect(); err != nil || replies[0].Text != "aaaaa" {
		t.Fatal(replies, err)
	}
}

func TestWelcomesThatCannotBe(t *testing.T) {
	for name, one := range map[string]struct {
		changes fields
		code    hearth.Code
	}{
		"protocol": {fields{"proto": 2}, hearth.UnsupportedProtocol},
		"no lease": {fields{"lease_s": 0}, hearth.ProtocolViolation},
		"negative": {fields{"lease_s": -1.0}, hearth.ProtocolViolation},
		"nan":      {fields{"lease_s": math.NaN()}, hearth.ProtocolViolation},
		"infinite": {fields{"lease_s": math.Inf(1)}, hearth.ProtocolViolation},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDaemon(t)
			go d.meet(one.changes)
			_, err := hearth.Dial(within(t), hearth.Options{Address: d.path})
			wants(t, err, one.code)
			client, p := dial(t, newDaemon(t), hearth.Options{}, nil)
			stream := generate(t, client)
			p.send(welcome(one.changes))
			_, err = stream.Collect()
			wants(t, err, one.code)
		})
	}
}

func TestALeaseOfAnyLengthIsKept(t *testing.T) {
	for _, lease := range []float64{1e-300, 1e-9, 1e308} {
		client, p := dial(t, newDaemon(t), hearth.Options{Silence: 3 * time.Second / 10},
			fields{"lease_s": lease})
		p.expect("lease")
		_ = client.Close()
	}
}

func TestTheFirstAcceptedCounts(t *testing.T) {
	client, p := dial(t, newDaemon(t), hearth.Options{}, nil)
	stream := generate(t, client)
	for tokens := 3; tokens < 5; tokens++ {
		p.send(fields{"t": "accepted", "id": "1", "prompt_tokens": tokens})
	}
	p.send(done("1", "stop"))
	if _, err := stream.Collect(); err != nil {
		t.Fatal(err)
	}
	if accepted, err := stream.Accepted(); err != nil || accepted.PromptTokens != 3 {
		t.Fatal(accepted, err)
	}
}

func TestAcceptedAnswersAGenerationAlone(t *testing.T) {
	client, p := dial(t, newDaemon(t), hearth.Options{}, nil)
	go func() {
		id := p.expect("tokenize")["id"]
		p.send(fields{"t": "accepted", "id": id, "prompt_tokens": 3})
	}()
	_, err := client.Tokenize(within(t), &hearth.Tokenize{Text: "a"})
	wants(t, err, hearth.ProtocolViolation)
}

func TestCancel(t *testing.T) {
	client, p := dial(t, newDaemon(t), hearth.Options{}, nil)
	stream := generate(t, client)
	p.expect("generate")
	stream.Cancel()
	if got := p.receive(); !reflect.DeepEqual(got, fields{"t": "cancel", "id": "1"}) {
		t.Fatal(got)
	}
	p.send(done("1", "cancelled"))
	if _, err := stream.Collect(); err != nil || stream.Done().Reason != "cancelled" {
		t.Fatal(err)
	}
	stream.Cancel()
	_ = stream.Close()
	closed := generate(t, client)
	p.expect("generate")
	_ = closed.Close()
	p.expect("cancel")
	_, err := closed.Collect()
	wants(t, err, hearth.ClientClosed)
}

func TestAContextEndsItsRequest(t *testing.T) {
	client, p := dial(t, newDaemon(t), hearth.Options{}, nil)
	ctx, cancel := context.WithCancel(context.Background())
	stream := generateIn(ctx, t, client)
	p.expect("generate")
	p.send(accepted("1"), delta("1", 0, "a"))
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	cancel()
	if stream.Next() || !errors.Is(stream.Err(), context.Canceled) {
		t.Fatal(stream.Err())
	}
	p.expect("cancel")
	p.send(done("1", "cancelled"))

	ctx, cancel = context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if _, err := client.Status(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

func TestAStreamThatNobodyReads(t *testing.T) {
	client, p := dial(t, newDaemon(t), hearth.Options{ReadAhead: 1000}, nil)
	unread, read := generate(t, client), generate(t, client)
	p.expect("generate")
	p.expect("generate")
	text := strings.Repeat("a", 600)
	for seq := 0; seq < 4; seq++ {
		p.send(delta("1", seq, text))
	}
	p.expect("cancel")
	p.send(done("1", "cancelled"), done("2", "stop"))
	if _, err := read.Collect(); err != nil {
		t.Fatal(err)
	}
	replies, err := unread.Collect()
	wants(t, err, hearth.SlowClient)
	if len(replies[0].Text) != 2*len(text) {
		t.Fatal("what was kept is lost")
	}
}

func TestCloseEndsWhatIsOpen(t *testing.T) {
	client, p := dial(t, newDaemon(t), hearth.Options{}, nil)
	stream := generate(t, client)
	p.expect("generate")
	_ = client.Close()
	_ = client.Close()
	p.expect("bye")
	_, err := stream.Collect()
	wants(t, err, hearth.ClientClosed)
	_, err = client.Status(within(t))
	wants(t, err, hearth.ClientClosed)
}

func TestPicturesGoInFramesOfTheirOwn(t *testing.T) {
	limits := fields{"images": 2, "image_bytes": 300, "request_image_bytes": 400}
	client, p := dial(t, newDaemon(t), hearth.Options{}, limits)
	picture := bytes.Repeat([]byte{7}, 300)
	ask := func(parts ...hearth.Part) error {
		stream, err := client.Generate(within(t), &hearth.Generate{
			Messages: []hearth.Message{{Role: "user", Parts: parts}},
		})
		if err == nil {
			_ = stream.Close()
		}
		return err
	}
	if err := ask(hearth.TextPart("?"), hearth.Image{Data: picture, Format: "png"}); err != nil {
		t.Fatal(err)
	}
	if got := p.expect("generate")["frames"]; !reflect.DeepEqual(got, [][]byte{picture}) {
		t.Fatal(got)
	}
	small := hearth.Image{Data: []byte{1}, Encoding: "mono8", Width: 1, Height: 1}
	wants(t, ask(hearth.Image{Data: append(picture, 7)}), hearth.ImageTooLarge)
	wants(t, ask(hearth.Image{Data: picture}, hearth.Image{Data: picture}), hearth.ImageTooLarge)
	wants(t, ask(small, small, small), hearth.InvalidValue)
}

func TestRequestsThatAreNotSent(t *testing.T) {
	client, _ := dial(t, newDaemon(t), hearth.Options{}, nil)
	unseen := []hearth.Message{{Role: "user", Parts: []hearth.Part{hearth.Image{Data: []byte{1}}}}}
	both := []hearth.Message{{Role: "user", Text: "a", Parts: []hearth.Part{}}}
	for _, one := range []struct {
		request hearth.Generate
		code    hearth.Code
	}{
		{hearth.Generate{Prompt: strings.Repeat("a", 1<<20)}, hearth.MessageTooLarge},
		{hearth.Generate{Messages: unseen}, hearth.UnsupportedOption},
		{hearth.Generate{Messages: both}, hearth.InvalidValue},
		{hearth.Generate{Prompt: "\xff"}, hearth.InvalidValue},
		{hearth.Generate{Prompt: "a", Extra: map[string]any{"prompt": "b"}}, hearth.InvalidValue},
		{hearth.Generate{Prompt: "a", Extra: map[string]any{"x": math.NaN()}}, hearth.InvalidValue},
		{hearth.Generate{Tools: []hearth.Tool{{Name: "a", Parameters: make(chan int)}}}, hearth.InvalidValue},
	} {
		_, err := client.Generate(within(t), &one.request)
		wants(t, err, one.code)
		if !errors.Is(err, hearth.KindRequest) {
			t.Fatal(err)
		}
	}
}

func TestRepliesAndCallsAreJoined(t *testing.T) {
	client, p := dial(t, newDaemon(t), hearth.Options{}, nil)
	stream := generate(t, client)
	p.expect("generate")
	first, second, cut := delta("1", 0, "a"), delta("1", 1, ""), delta("1", 2, "b")
	first["tool_calls"] = []fields{{"index": 0, "id": "c", "name": "lamp", "arguments": `{"on":`}}
	second["tool_calls"] = []fields{{"index": 0, "arguments": `true}`}, {"index": 1, "arguments": `{`}}
	cut["choice"], cut["tokens"], cut["reasoning"] = 1, []int{5}, "hm"
	p.send(first, second, cut, done("1", "tool_calls"))
	replies, err := stream.Collect()
	if err != nil || len(replies) != 2 {
		t.Fatal(replies, err)
	}
	call := hearth.ToolCall{ID: "c", Name: "lamp", Arguments: []byte(`{"on":true}`)}
	want := hearth.Message{Role: "assistant", Text: "a", ToolCalls: []hearth.ToolCall{call}}
	if got := replies[0].Message(); !reflect.DeepEqual(got, want) {
		t.Fatal(got)
	}
	if got := replies[1]; got.Text != "b" || got.Reasoning != "hm" || got.Tokens[0] != 5 {
		t.Fatal(got)
	}
}

func TestManyStreamsOfManyGoroutines(t *testing.T) {
	client, p := dial(t, newDaemon(t), hearth.Options{}, nil)
	const streams, deltas = 20, 50
	go func() {
		for i := 0; i < streams; i++ {
			id := p.expect("generate")["id"]
			for seq := 0; seq < deltas; seq++ {
				p.send(delta(id, seq, fmt.Sprint(id, ",")))
			}
			p.send(done(id, "stop"))
		}
	}()
	var all sync.WaitGroup
	for i := 0; i < streams; i++ {
		all.Add(1)
		go func() {
			defer all.Done()
			stream, err := client.Generate(within(t), &hearth.Generate{Prompt: "a"})
			if err != nil {
				t.Error(err)
				return
			}
			replies, err := stream.Collect()
			parts := strings.Split(replies[0].Text, ",")
			if err != nil || len(parts) != deltas+1 || parts[0] != parts[deltas-1] {
				t.Error(replies[0].Text, err)
			}
		}()
	}
	all.Wait()
}

func FuzzDecodeAnswer(f *testing.F) {
	for _, name := range []string{"answers", "malformed"} {
		for _, v := range vectors(f, name) {
			f.Add(unhex(f, v.Hex))
		}
	}
	f.Add(bytes.Repeat([]byte{0x91}, 1<<16))
	f.Add([]byte("\x81\xa1t\xdf\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, frame []byte) {
		if answer, err := hearth.DecodeAnswer(frame); answer != nil && err != nil {
			t.Fatal("an answer and an error")
		}
	})
}

func TestHostileBytesOfAnswers(t *testing.T) {
	deep := append([]byte("\x81\xa1x"), bytes.Repeat([]byte{0x91}, 8<<20)...)
	for name, frame := range map[string][]byte{
		"nested 8 million deep":     append(deep, 0),
		"a map of four billion":     []byte("\xdf\xff\xff\xff\xff\xa1t"),
		"a list of four billion":    []byte("\x82\xa1t\xa5delta\xa6tokens\xdd\xff\xff\xff\xff"),
		"a text of four billion":    []byte("\x81\xa1t\xdb\xff\xff\xff\xff"),
		"text that is no UTF-8":     []byte("\x82\xa1t\xa6leased\xa7seconds\xa1\xff"),
		"a byte too many":           []byte("\x82\xa1t\xa6leased\xa7seconds\x01\x00"),
		"a key that is a number":    []byte("\x82\x01\x01\xa1t\xa6leased"),
		"no type":                   []byte("\x81\xa7seconds\x01"),
		"a type that is a number":   []byte("\x82\xa1t\x01\xa7seconds\x01"),
		"nil for what is required":  []byte("\x82\xa1t\xa6leased\xa7seconds\xc0"),
		"more values than could be": append([]byte("\x81\xa1x\xdd\x00\x50\x00\x00"), make([]byte, 0x500000)...),
	} {
		if answer, err := hearth.DecodeAnswer(frame); err == nil {
			t.Errorf("%s: it means %v", name, answer)
		}
	}
}
