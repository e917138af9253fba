from hearth_client import Client

turns = [{"role": "user", "content": "Turn on the lamp"}]
with Client() as client:  # $HEARTH_SOCKET, or the agreed place
    with client.generate(messages=turns, max_tokens=64) as generation:
        for delta in generation:
            print(delta.text, end="", flush=True)
print()
