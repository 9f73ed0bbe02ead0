//! Events as MessagePack, byte for byte as msgspec writes vLLM's structs: a batch is an array, an
//! event a map with its kind under `type`, without the fields that have their default value.

use folio_engine::{KvEvent, Medium};

/// A process has one engine, so its rank is always 0.
const DATA_PARALLEL_RANK: u64 = 0;

/// The payload of a message; `windows` as in [`super::KvEventsConfig`].
pub fn batch(seconds: f64, events: &[KvEvent], windows: &[Option<usize>]) -> Vec<u8> {
    let mut pack = Packer::default();
    pack.array(3);
    pack.float(seconds);
    pack.array(events.len());
    for event in events {
        pack.event(event, windows);
    }
    pack.uint(DATA_PARALLEL_RANK);
    pack.bytes
}

/// The tier's name, by which routers rank it. `GPU` is the tier that attention reads, on a CPU as
/// well, as in vLLM.
fn name(medium: Medium) -> &'static str {
    match medium {
        Medium::Device => "GPU",
        Medium::Host => "CPU",
        Medium::Disk => "STORAGE",
    }
}

#[derive(Default)]
struct Packer {
    bytes: Vec<u8>,
}

impl Packer {
    fn event(&mut self, event: &KvEvent, windows: &[Option<usize>]) {
        match event {
            KvEvent::Stored { hashes, parent, tokens, block_tokens, medium, group } => {
                let window = windows.get(*group).copied().flatten();
                self.map(if window.is_some() { 11 } else { 10 });
                self.field("type").str("BlockStored");
                self.field("block_hashes").uints(hashes.iter().copied());
                match parent {
                    Some(parent) => self.field("parent_block_hash").uint(*parent),
                    None => self.field("parent_block_hash").nil(),
                }
                self.field("token_ids").uints(tokens.iter().map(|&token| token.into()));
                self.field("block_size").uint(*block_tokens as u64);
                self.field("lora_id").nil();
                self.field("medium").str(name(*medium));
                self.field("lora_name").nil();
                // A router skips a group without a kind.
                self.field("group_idx").uint(*group as u64);
                match window {
                    None => self.field("kv_cache_spec_kind").str("full_attention"),
                    Some(window) => {
                        self.field("kv_cache_spec_kind").str("sliding_window");
                        self.field("kv_cache_spec_sliding_window").uint(window as u64);
                    }
                }
            }
            KvEvent::Removed { hashes, medium, group } => {
                self.map(4);
                self.field("type").str("BlockRemoved");
                self.field("block_hashes").uints(hashes.iter().copied());
                self.field("medium").str(name(*medium));
                self.field("group_idx").uint(*group as u64);
            }
            KvEvent::Cleared => {
                self.map(1);
                self.field("type").str("AllBlocksCleared");
            }
        }
    }

    fn field(&mut self, name: &str) -> &mut Self {
        self.str(name);
        self
    }

    fn uints(&mut self, values: impl ExactSizeIterator<Item = u64>) {
        self.array(values.len());
        for value in values {
            self.uint(value);
        }
    }

    /// The shortest encoding of the value, which msgspec writes too.
    fn uint(&mut self, value: u64) {
        if value < 0x80 {
            self.bytes.push(value as u8);
        } else if let Ok(value) = u8::try_from(value) {
            self.bytes.extend([0xcc, value]);
        } else if let Ok(value) = u16::try_from(value) {
            self.bytes.push(0xcd);
            self.bytes.extend(value.to_be_bytes());
        } else if let Ok(value) = u32::try_from(value) {
            self.bytes.push(0xce);
            self.bytes.extend(value.to_be_bytes());
        } else {
            self.bytes.push(0xcf);
            self.bytes.extend(value.to_be_bytes());
        }
    }

    fn float(&mut self, value: f64) {
        self.bytes.push(0xcb);
        self.bytes.extend(value.to_be_bytes());
    }

    fn nil(&mut self) {
        self.bytes.push(0xc0);
    }

    fn array(&mut self, len: usize) {
        if len < 16 {
            self.bytes.push(0x90 | len as u8);
        } else if let Ok(len) = u16::try_from(len) {
            self.bytes.push(0xdc);
            self.bytes.extend(len.to_be_bytes());
        } else {
            let len = u32::try_from(len).expect("no step has 4 G tokens");
            self.bytes.push(0xdd);
            self.bytes.extend(len.to_be_bytes());
        }
    }

    fn map(&mut self, len: u8) {
        assert!(len < 16, "no event has {len} fields");
        self.bytes.push(0x80 | len);
    }

    fn str(&mut self, text: &str) {
        assert!(text.len() < 32, "{text:?} is too long for the name of an event or field");
        self.bytes.push(0xa0 | text.len() as u8);
        self.bytes.extend(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECONDS: f64 = 1_789_095_808.837_884_7;

    fn check(events: &[KvEvent], expect: &str) {
        let bytes = batch(SECONDS, events, &[None, Some(1024)]);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expect, "{events:?}");
    }

    fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32], medium: Medium, group: usize) -> KvEvent {
        let block_tokens = tokens.len() / hashes.len();
        KvEvent::Stored { hashes: hashes.into(), parent, tokens: tokens.into(), block_tokens, medium, group }
    }

    /// Golden bytes of msgspec 0.22.0 (`msgspec.msgpack.Encoder`), from structs declared as in vLLM
    /// 0.26 and later, with ts = 1789095808.8378847 and data_parallel_rank = 0.
    #[test]
    fn bytes_are_those_of_msgspec() {
        let two = [1, 0xfedc_ba98_7654_3210];
        check(
            &[stored(&two, None, &[0, 127, 128, 255, 256, 65535, 65536, 151645], Medium::Device, 0)],
            "93cb41daa8dbe0359fe7918aa474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739201cffedcba987654\
             3210b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647398007fcc80ccffcd0100cdffffce00010000ce00\
             02505daa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75\
             705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00",
        );
        let tokens: Vec<u32> = (300..316).collect();
        check(
            &[stored(&[7], Some(1 << 63), &tokens, Medium::Host, 1)],
            "93cb41daa8dbe0359fe7918ba474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739107b1706172656e74\
             5f626c6f636b5f68617368cf8000000000000000a9746f6b656e5f696473dc0010cd012ccd012dcd012ecd012fcd0130cd0131\
             cd0132cd0133cd0134cd0135cd0136cd0137cd0138cd0139cd013acd013baa626c6f636b5f73697a6510a76c6f72615f6964c0\
             a66d656469756da3435055a96c6f72615f6e616d65c0a967726f75705f69647801b26b765f63616368655f737065635f6b696e\
             64ae736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c6964696e675f77696e646f77cd040000",
        );
        check(
            &[KvEvent::Removed { hashes: two.into(), medium: Medium::Disk, group: 0 }],
            "93cb41daa8dbe0359fe79184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739201cffedcba9876\
             543210a66d656469756da753544f52414745a967726f75705f6964780000",
        );
        check(&[KvEvent::Cleared], "93cb41daa8dbe0359fe79181a474797065b0416c6c426c6f636b73436c656172656400");
        check(
            &[
                KvEvent::Removed { hashes: vec![3], medium: Medium::Device, group: 1 },
                KvEvent::Cleared,
                stored(&[4], Some(3), &[5, 6], Medium::Disk, 0),
            ],
            "93cb41daa8dbe0359fe79384a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739103a66d65646975\
             6da3475055a967726f75705f6964780181a474797065b0416c6c426c6f636b73436c65617265648aa474797065ab426c6f636b\
             53746f726564ac626c6f636b5f6861736865739104b1706172656e745f626c6f636b5f6861736803a9746f6b656e5f69647392\
             0506aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da753544f52414745a96c6f72615f6e616d65c0a967\
             726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00",
        );
    }

    #[test]
    fn lengths_have_the_shortest_encoding() {
        for (len, expect) in
            [(15, &[0x9f][..]), (16, &[0xdc, 0, 16]), (65535, &[0xdc, 255, 255]), (65536, &[0xdd, 0, 1, 0, 0])]
        {
            let mut pack = Packer::default();
            pack.array(len);
            assert_eq!(pack.bytes, expect, "{len}");
        }
    }
}
