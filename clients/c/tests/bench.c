/* The bench of clients/conformance/BENCH.md: one JSON object on standard output. */
#define _GNU_SOURCE
#include <hearth.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

enum { SIDE = 512, SEED = 64, SESSIONS = 32, MOST = 200 };

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static hearth_error error;

static void check(int code) {
  if (code == HEARTH_OK) return;
  fprintf(stderr, "%s (%s)\n", error.message, error.code);
  exit(1);
}

static hearth_client *open_client(void) {
  hearth_client *client = NULL;
  check(hearth_client_new(NULL, &client, &error));
  check(hearth_connect(client, NULL, &error));
  return client;
}

/* The number of deltas. */
static int read_reply(hearth_client *client, const char *request, const hearth_frame *frames,
                      size_t frame_count) {
  hearth_generation *reply = NULL;
  const hearth_event *event = NULL;
  int deltas = 0;
  check(hearth_generate(client, request, frames, frame_count, NULL, NULL, &reply, &error));
  do {
    check(hearth_next(reply, -1, &event, &error));
    if (event && event->type == HEARTH_FAILED) check((error = *event->error).kind);
    deltas += event && event->type == HEARTH_DELTA;
  } while (event);
  hearth_generation_free(reply);
  return deltas;
}

static double status_s(hearth_client *client) {
  char *report = NULL;
  const double began = now();
  check(hearth_status(client, &report, &error));
  hearth_free(report);
  return now() - began;
}

static double delta_s(hearth_client *client) {
  const double began = now();
  const int deltas = read_reply(
      client, "{\"prompt\": \"Once upon a time\", \"max_tokens\": 256, \"ignore_eos\": true}", NULL,
      0);
  return (now() - began) / deltas;
}

static double image_s(hearth_client *client) {
  static char pixels[4 * SIDE * SIDE];
  const hearth_frame frame = {pixels, sizeof pixels};
  if (getentropy(pixels, SEED)) exit(1);
  for (size_t at = SEED; at < sizeof pixels; at += SEED) memcpy(pixels + at, pixels, SEED);
  const double began = now();
  read_reply(client,
             "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image\", \"frame\": 1, "
             "\"encoding\": \"rgba8\", \"width\": 512, \"height\": 512}]}], \"max_tokens\": 1}",
             &frame, 1);
  return now() - began;
}

static int by_value(const void *one, const void *other) {
  const double difference = *(const double *)one - *(const double *)other;
  return (difference > 0) - (difference < 0);
}

static double median(int count, double (*task)(hearth_client *), hearth_client *client) {
  double all[MOST];
  for (int i = 0; i < count / 10 + 1; ++i) task(client);
  for (int i = 0; i < count; ++i) all[i] = task(client);
  qsort(all, (size_t)count, sizeof *all, by_value);
  return (all[(count - 1) / 2] + all[count / 2]) / 2;
}

static long resident_kb(void) {
  char line[256];
  long kb = 0;
  FILE *status = fopen("/proc/self/status", "r");
  while (status && fgets(line, sizeof line, status)) {
    if (!strncmp(line, "VmRSS:", 6)) kb = strtol(line + 6, NULL, 10);
  }
  if (status) fclose(status);
  return kb;
}

int main(int count, char **arguments) {
  if (count < 2 || setenv("HEARTH_SOCKET", arguments[1], 1)) return 2;
  hearth_client *client = open_client();
  hearth_client *more[SESSIONS];
  status_s(client);
  const long before = resident_kb();
  for (int i = 0; i < SESSIONS; ++i) status_s(more[i] = open_client());
  const double session = (double)(resident_kb() - before) / SESSIONS;
  for (int i = 0; i < SESSIONS; ++i) hearth_client_free(more[i]);
  const double status = median(200, status_s, client);
  const double delta = median(20, delta_s, client);
  const double image = median(10, image_s, client);
  hearth_client_free(client);
  printf("{\"status_us\": %.3f, \"delta_us\": %.3f, \"image_ms\": %.4f, \"rss_kb\": %.2f}\n",
         1e6 * status, 1e6 * delta, 1e3 * image, session);
  return 0;
}
