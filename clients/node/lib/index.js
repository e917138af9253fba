export { Client, FEATURES } from "./client.js";
export { ConnectionFailed, HearthError, RequestRefused, ServiceFailed } from "./errors.js";
export { Generation, Reply } from "./generation.js";
