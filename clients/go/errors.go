package hearth

import (
	"fmt"
	"math"
	"time"
)

// Code names a failure: those of PROTOCOL.md, and this client's own. It is an error so that
// errors.Is(err, hearth.QueueFull) tells whether err has this code.
type Code string

// Error is the code itself.
func (c Code) Error() string { return string(c) }

// The request must change before it can work.
const (
	InvalidValue      Code = "invalid_value"
	UnsupportedOption Code = "unsupported_option"
	GrammarInvalid    Code = "grammar_invalid"
	PromptEmpty       Code = "prompt_empty"
	PromptTooLong     Code = "prompt_too_long"
	CapacityExceeded  Code = "capacity_exceeded"
	AdapterUnknown    Code = "adapter_unknown"
	CacheFull         Code = "cache_full"
	ImageInvalid      Code = "image_invalid"
	ImageTooLarge     Code = "image_too_large"
	ImageTimeout      Code = "image_timeout"
	BadMessage        Code = "bad_message"
	MessageTooLarge   Code = "message_too_large"
	UnknownMessage    Code = "unknown_message"
	DuplicateID       Code = "duplicate_id"
	RepeatedFailure   Code = "repeated_failure"
)

// The request was fine, and the service could not take or finish it.
const (
	TooManyClients      Code = "too_many_clients"
	TooManyRequests     Code = "too_many_requests"
	QueueFull           Code = "queue_full"
	DeadlineExceeded    Code = "deadline_exceeded"
	SlowClient          Code = "slow_client"
	LeaseExpired        Code = "lease_expired"
	ShuttingDown        Code = "shutting_down"
	ExecutorFailed      Code = "executor_failed"
	EncoderFailed       Code = "encoder_failed"
	WeightsInvalid      Code = "weights_invalid"
	CancelledByOperator Code = "cancelled_by_operator"
	NonFinite           Code = "non_finite"
	OutOfMemory         Code = "out_of_memory"
	Internal            Code = "internal"
)

// The daemon cannot be reached, or the conversation with it broke.
const (
	UnsupportedProtocol Code = "unsupported_protocol"
	NotAllowed          Code = "not_allowed"
	ConnectionRefused   Code = "connection_refused"
	ConnectionTimeout   Code = "connection_timeout"
	ConnectionLost      Code = "connection_lost"
	ProtocolViolation   Code = "protocol_violation"
	ClientClosed        Code = "client_closed"
)

// Kind is a family of codes. It is an error as Code is: errors.Is(err, hearth.KindService).
type Kind string

// Error is the kind itself.
func (k Kind) Error() string { return string(k) }

// The families: change the request; try again, later or elsewhere; look for the daemon.
const (
	KindRequest    Kind = "request"
	KindService    Kind = "service"
	KindConnection Kind = "connection"
)

var kinds = map[Code]Kind{
	InvalidValue: KindRequest, UnsupportedOption: KindRequest, GrammarInvalid: KindRequest,
	PromptEmpty: KindRequest, PromptTooLong: KindRequest, CapacityExceeded: KindRequest,
	AdapterUnknown: KindRequest, CacheFull: KindRequest, ImageInvalid: KindRequest,
	ImageTooLarge: KindRequest, ImageTimeout: KindRequest, BadMessage: KindRequest,
	MessageTooLarge: KindRequest, UnknownMessage: KindRequest, DuplicateID: KindRequest,
	RepeatedFailure: KindRequest,

	UnsupportedProtocol: KindConnection, NotAllowed: KindConnection,
	ConnectionRefused: KindConnection, ConnectionTimeout: KindConnection,
	ConnectionLost: KindConnection, ProtocolViolation: KindConnection, ClientClosed: KindConnection,
}

// Kind is the family of a code; one that is unknown here is a fault of the service.
func (c Code) Kind() Kind {
	if kind, known := kinds[c]; known {
		return kind
	}
	return KindService
}

// Error is any failure but the end of a context, whose own error is returned.
type Error struct {
	Code    Code
	Message string
	// Field at fault, such as "messages[0].role"; empty where there is none.
	Field string
	// RetryAfter is the time after which there should be room; 0 where the daemon named none.
	RetryAfter time.Duration
	// Usage of a generation that had been accepted; nil where the daemon told none.
	Usage *Usage

	cause error
}

// Error is the message, with code and field.
func (e *Error) Error() string {
	text := fmt.Sprintf("%s (%s", e.Message, e.Code)
	if e.Field != "" {
		text += ", " + e.Field
	}
	if e.RetryAfter > 0 {
		text += fmt.Sprintf(", again in %v", e.RetryAfter)
	}
	return text + ")"
}

// Kind is the family of the code.
func (e *Error) Kind() Kind { return e.Code.Kind() }

// Is tells whether target is this error's Code or Kind.
func (e *Error) Is(target error) bool { return target == e.Code || target == e.Kind() }

// Unwrap is the error of the system or of a decoder that led to this one, or nil.
func (e *Error) Unwrap() error { return e.cause }

func failure(code Code, field string, cause error, format string, values ...any) *Error {
	return &Error{Code: code, Field: field, cause: cause, Message: fmt.Sprintf(format, values...)}
}

// errorAnswer is the answer `error`.
type errorAnswer struct {
	ID         string   `json:"id,omitempty"`
	Code       string   `json:"code"`
	Message    string   `json:"message"`
	Field      string   `json:"field,omitempty"`
	RetryAfter *float64 `json:"retry_after_s,omitempty"`
	Usage      *Usage   `json:"usage,omitempty"`
}

func (a *errorAnswer) error() *Error {
	e := &Error{Code: Code(a.Code), Message: a.Message, Field: a.Field, Usage: a.Usage}
	if e.Code == "hello_required" {
		e.Code = ConnectionLost
	}
	if a.RetryAfter != nil && *a.RetryAfter > 0 {
		seconds := math.Min(*a.RetryAfter, math.MaxInt32)
		e.RetryAfter = time.Duration(seconds * float64(time.Second))
	}
	return e
}
