/**
 * The client of the Hearth daemon, which serves language and vision-language models on this machine.
 *
 * <p>{@link hearth.client.HearthClient} is where to begin. The protocol is described in
 * {@code clients/PROTOCOL.md}; names of fields there are names of methods here.
 */
package hearth.client;
