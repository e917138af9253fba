package hearth_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"reflect"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"hearth"
	"hearth/internal/fromjson"
)

type vector struct {
	Name    string
	From    string
	Hex     string
	Message json.RawMessage
	Means   json.RawMessage
	Frames  []string
}

func vectors(tb testing.TB, name string) []vector {
	tb.Helper()
	text, err := os.ReadFile("../vectors/" + name + ".json")
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

func TestAnswersMeanWhatTheVectorsSay(t *testing.T) {
	for _, v := range vectors(t, "answers") {
		t.Run(v.Name, func(t *testing.T) {
			answer, err := hearth.DecodeAnswer(unhex(t, v.Hex))
			if err != nil {
				t.Fatal(err)
			}
			meaning := v.Means
			if meaning == nil {
				meaning = v.Message
			}
			want := asJSON(t, meaning).(map[string]any)
			delete(want, "t")
			text, err := json.Marshal(answer)
			if err != nil {
				t.Fatal(err)
			}
			if got := asJSON(t, text); !reflect.DeepEqual(got, any(want)) {
				t.Errorf("it means %v, not %v", got, want)
			}
		})
	}
}

func TestRequestsSayWhatTheVectorsSay(t *testing.T) {
	for _, v := range vectors(t, "requests") {
		given := asJSON(t, v.Message).(map[string]any)
		kind, id := given["t"], given["id"]
		if kind != "generate" && kind != "tokenize" {
			continue // conversation_test.go has the others.
		}
		t.Run(v.Name, func(t *testing.T) {
			var frames [][]byte
			for _, frame := range v.Frames {
				frames = append(frames, unhex(t, frame))
			}
			meaning := v.Means
			if meaning == nil {
				meaning = v.Message
			}
			fields := numbered(t, meaning)
			delete(fields, "t")
			delete(fields, "id")
			text, err := json.Marshal(withData(fields, frames))
			if err != nil {
				t.Fatal(err)
			}
			data, sent := encode(t, kind.(string), id.(string), text)
			got := withData(unpacked(t, data), sent)
			want := withData(evened(numbered(t, meaning)), frames)
			if !reflect.DeepEqual(got, want) {
				t.Errorf("it says %v, not %v", got, want)
			}
		})
	}
}

func encode(t *testing.T, kind, id string, text []byte) (data []byte, frames [][]byte) {
	t.Helper()
	var err error
	if kind == "generate" {
		var request *hearth.Generate
		if request, err = fromjson.Generate(text); err == nil {
			data, frames, err = request.Encode(id)
		}
	} else {
		var request *hearth.Tokenize
		if request, err = fromjson.Tokenize(text); err == nil {
			data, frames, err = request.Encode(id)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return data, frames
}

// withData puts the bytes of pictures in place of the numbers of their frames.
func withData(value any, frames [][]byte) any {
	switch value := value.(type) {
	case map[string]any:
		for name, inner := range value {
			if name == "frame" {
				delete(value, name)
				number := int(evened(inner).(int64))
				value["data"] = base64.StdEncoding.EncodeToString(frames[number-1])
				continue
			}
			value[name] = withData(inner, frames)
		}
	case []any:
		for i := range value {
			value[i] = withData(value[i], frames)
		}
	}
	return value
}

// numbered reads JSON with all digits of its numbers.
func numbered(tb testing.TB, text []byte) map[string]any {
	tb.Helper()
	var value map[string]any
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	if err := decoder.Decode(&value); err != nil {
		tb.Fatal(err)
	}
	return value
}

// unpacked decodes a message; whole numbers are int64, others float64.
func unpacked(tb testing.TB, data []byte) any {
	tb.Helper()
	var value any
	if err := msgpack.Unmarshal(data, &value); err != nil {
		tb.Fatal(err)
	}
	return evened(value)
}

func evened(value any) any {
	of := reflect.ValueOf(value)
	if number, ok := value.(json.Number); ok {
		if whole, err := number.Int64(); err == nil {
			return whole
		}
		fraction, _ := number.Float64()
		return evened(fraction)
	}
	switch {
	case value == nil:
	case of.CanInt():
		return of.Int()
	case of.CanUint():
		return int64(of.Uint())
	case of.CanFloat():
		if number := of.Float(); number == math.Trunc(number) && math.Abs(number) < 1<<53 {
			return int64(number)
		}
		return of.Float()
	}
	switch value := value.(type) {
	case map[string]any:
		for name := range value {
			value[name] = evened(value[name])
		}
	case []any:
		for i := range value {
			value[i] = evened(value[i])
		}
	}
	return value
}

func asJSON(tb testing.TB, text []byte) any {
	tb.Helper()
	var value any
	if err := json.Unmarshal(text, &value); err != nil {
		tb.Fatal(err)
	}
	return value
}
