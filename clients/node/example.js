import { Client } from "hearth-client";

const client = new Client(); // $HEARTH_SOCKET, or the agreed place
try {
  const messages = [{ role: "user", content: "Turn on the desk lamp" }];
  for await (const delta of client.generate({ messages, max_tokens: 64 })) process.stdout.write(delta.text);
  process.stdout.write("\n");
} finally {
  await client.close();
}
