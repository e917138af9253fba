#include <hearth.h>
#include <stdio.h>

int main(void) {
  const char *request =
      "{\"messages\": [{\"role\": \"user\", \"content\": \"Turn on the desk lamp\"}],"
      " \"max_tokens\": 64}";
  hearth_client *client = NULL; /* at $HEARTH_SOCKET, or the agreed place */
  hearth_generation *reply = NULL;
  const hearth_event *event = NULL;
  hearth_error error = {0};
  if (hearth_client_new(NULL, &client, &error) == HEARTH_OK &&
      hearth_generate(client, request, NULL, 0, NULL, NULL, &reply, &error) == HEARTH_OK) {
    while (hearth_next(reply, -1, &event, &error) == HEARTH_OK && event) {
      if (event->type == HEARTH_DELTA) fwrite(event->text, 1, event->text_size, stdout);
      if (event->type == HEARTH_FAILED) error = *event->error;
      fflush(stdout);
    }
    putchar('\n');
  }
  if (error.kind != HEARTH_OK) fprintf(stderr, "%s (%s)\n", error.message, error.code);
  hearth_generation_free(reply);
  hearth_client_free(client);
  return error.kind != HEARTH_OK;
}
