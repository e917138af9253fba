from hearth_client import Client

turns = [{"role": "user", "content": "Turn on the desk lamp"}]
with Client() as client:  # $HEARTH_SOCKET, or the agreed place
    for delta in client.generate(messages=turns, max_tokens=64):
        print(delta.text, end="", flush=True)
print()
