/* The C client of the Hearth daemon: libhearth.so.0.
 *
 * Requests and options are JSON text in UTF-8, by the names of PROTOCOL.md; events are structs, and
 * the answer's own msgpack beside them. A client is for any number of threads, a generation for
 * one reader at a time; hearth_cancel is for any thread.
 *
 * Memory: a call allocates what its handle needs, and frees that with the handle. What a caller has
 * to free is returned by hearth_connect, hearth_status, hearth_tokenize and hearth_detokenize, with
 * hearth_free. An event belongs to its generation, and lives until the next hearth_next or
 * hearth_generation_free; one of a callback lives as long as the callback. Errors are written into
 * the caller's own struct, which may be NULL.
 *
 * No C++ exception leaves the library. A client does not survive a fork. */
#ifndef HEARTH_H
#define HEARTH_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define HEARTH_API __attribute__((visibility("default")))
#else
#define HEARTH_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hearth_client hearth_client;
typedef struct hearth_generation hearth_generation;

/* What calls return: HEARTH_OK, or the family of the failure. */
enum {
  HEARTH_OK = 0,
  HEARTH_REQUEST = 1,    /* the request must change */
  HEARTH_SERVICE = 2,    /* the service could not take or finish it */
  HEARTH_CONNECTION = 3, /* the daemon cannot be reached, or the conversation broke */
  HEARTH_USAGE = 4       /* the call is wrong, as with a NULL for a handle, or memory is short */
};

/* Counts in tokens, times in milliseconds. */
typedef struct hearth_usage {
  int64_t prompt_tokens;
  int64_t completion_tokens;
  int64_t reasoning_tokens; /* of the completion */
  int64_t cached_tokens;
  double queue_ms;
  double prefill_ms;
  double decode_ms;
} hearth_usage;

/* A failure. Texts end with a 0, and are cut where they are longer. */
typedef struct hearth_error {
  int32_t kind;         /* HEARTH_REQUEST, ... */
  int32_t has_usage;    /* 1 where `usage` was told */
  double retry_after_s; /* seconds after which there should be room; below 0 where none are told */
  hearth_usage usage;   /* what a generation that was accepted had taken */
  char code[64];        /* a code of PROTOCOL.md or of the client */
  char field[192];      /* the field at fault, or "" */
  char message[512];    /* one sentence for people */
} hearth_error;

/* A picture's bytes, which are copied. */
typedef struct hearth_frame {
  const void *data;
  size_t size;
} hearth_frame;

/* More of the call `index`: `id` and `name` in its first piece, else "", then JSON text. */
typedef struct hearth_call {
  int64_t index;
  const char *id;
  const char *name;
  const char *arguments;
} hearth_call;

enum {
  HEARTH_ACCEPTED = 1, /* the request is in the queue */
  HEARTH_DELTA = 2,    /* more of the reply */
  HEARTH_DONE = 3,     /* its end */
  HEARTH_FAILED = 4    /* its end, in place of HEARTH_DONE */
};

/* What comes of a generation. Fields that its type does not have are 0. Texts are UTF-8 and end
 * with a 0; those of the model may have a 0 within, and so have a size. Later versions of the
 * library add fields at the end. */
typedef struct hearth_event {
  int32_t type;
  const uint8_t *raw; /* the answer as it came, a msgpack map; none of HEARTH_FAILED */
  size_t raw_size;
  /* HEARTH_ACCEPTED */
  int64_t prompt_tokens;
  const char *request; /* the id in the daemon's logs */
  /* HEARTH_DELTA */
  int64_t seq;
  int64_t choice;
  const char *text;
  size_t text_size;
  const char *reasoning;
  size_t reasoning_size;
  const int64_t *tokens;
  size_t token_count;
  const hearth_call *calls;
  size_t call_count;
  /* HEARTH_DONE */
  const char *reason;
  const char *stop; /* the stop string that ended it, or "" */
  const hearth_usage *usage;
  /* HEARTH_FAILED */
  const hearth_error *error;
} hearth_event;

/* Reader of events on the client's own thread. It must not block. It may call hearth_cancel,
 * hearth_generation_free, also of its own generation, and hearth_generate, and is called once with
 * HEARTH_DONE or HEARTH_FAILED, last. It may be called before hearth_generate has returned. */
typedef void (*hearth_callback)(const hearth_event *event, void *user);

/* The library's version, "0.3.0". */
HEARTH_API const char *hearth_version(void);

/* Free what a call has returned to be freed; NULL is let be. */
HEARTH_API void hearth_free(void *memory);

/* Make a client, which connects with its first request. `options_json` is NULL or a map of address
 * (a path, ipc://PATH or tcp://HOST:PORT), name, timeout_s (wait for the welcome), silence_s (time
 * without an answer after which the daemon is given up), answer_s, lease_s, status_only, features,
 * buffer_bytes (that a generation keeps for a slow reader), server_key, public_key, secret_key. */
HEARTH_API int hearth_client_new(const char *options_json, hearth_client **client,
                                 hearth_error *error);

/* End the session: what is open ends with HEARTH_FAILED (client_closed), and what follows fails. */
HEARTH_API void hearth_client_close(hearth_client *client);

/* Close a client and free it; its generations stay to be freed. */
HEARTH_API void hearth_client_free(hearth_client *client);

/* Open a session, unless one is open. `welcome_json`, unless NULL, gets the welcome as JSON text,
 * to be freed. */
HEARTH_API int hearth_connect(hearth_client *client, char **welcome_json, hearth_error *error);

/* Ask what the daemon serves and does. `report_json` gets JSON text, to be freed. */
HEARTH_API int hearth_status(hearth_client *client, char **report_json, hearth_error *error);

/* Ask for token ids: `request_json` has the fields of `tokenize`, but `id`. `tokens` gets
 * `token_count` ids, to be freed. */
HEARTH_API int hearth_tokenize(hearth_client *client, const char *request_json,
                               const hearth_frame *frames, size_t frame_count, int64_t **tokens,
                               size_t *token_count, hearth_error *error);

/* Ask for the text of token ids. `text` gets `text_size` bytes and a 0, to be freed; `text_size`
 * may be NULL. */
HEARTH_API int hearth_detokenize(hearth_client *client, const int64_t *tokens, size_t token_count,
                                 char **text, size_t *text_size, hearth_error *error);

/* Start a generation: `request_json` has the fields of `generate`, but `id`, and `frame` of its
 * pictures counts from 1 in `frames`. With a `callback` events go there, with `user`; else
 * hearth_next reads them. */
HEARTH_API int hearth_generate(hearth_client *client, const char *request_json,
                               const hearth_frame *frames, size_t frame_count,
                               hearth_callback callback, void *user,
                               hearth_generation **generation, hearth_error *error);

/* Wait for the next event for `timeout_ms` at most, for any time where it is below 0. `event` gets
 * NULL where nothing came, and behind the last event. A failure of the generation is an event. */
HEARTH_API int hearth_next(hearth_generation *generation, int timeout_ms, const hearth_event **event,
                           hearth_error *error);

/* 1 once hearth_next has returned the last event, else 0. */
HEARTH_API int hearth_ended(const hearth_generation *generation);

/* A descriptor to poll, which is readable while events wait; call hearth_next with 0 until it has
 * none. It belongs to the generation. -1 where no descriptor is free. */
HEARTH_API int hearth_descriptor(hearth_generation *generation);

/* Ask the daemon to end a generation, which then ends with the reason `cancelled`; does nothing
 * when it has ended. */
HEARTH_API void hearth_cancel(hearth_generation *generation);

/* Free a generation; one that has not ended is cancelled, and its callback is called no more. */
HEARTH_API void hearth_generation_free(hearth_generation *generation);

#ifdef __cplusplus
}
#endif

#endif
