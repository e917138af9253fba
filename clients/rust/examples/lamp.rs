//! The program of the README.

use std::io::{self, Write};

use hearth_client::{Client, Generate, Message};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let client = Client::connect()?; // $HEARTH_SOCKET, or the agreed place
    let turns = [Message::user("Turn on the desk lamp")];
    let mut reply = client.generate(Generate::chat(turns).max_tokens(64));
    for delta in &mut reply {
        print!("{}", delta?.text);
        io::stdout().flush()?;
    }
    println!();
    Ok(())
}
