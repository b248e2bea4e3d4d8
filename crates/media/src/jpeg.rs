//! Whether a JPEG is whole. The decoder paints what is missing grey and reports success, so a half-downloaded file
//! would be learned from; this walk over the marker segments (ITU-T T.81, annex B) finds it first.

/// Says what is missing if the stream does not reach its end-of-image marker.
pub(crate) fn check_complete(bytes: &[u8]) -> Result<(), &'static str> {
    const TRUNCATED: &str = "the JPEG ends before its end-of-image marker (truncated)";
    let mut at = 2; // behind the start-of-image marker
    let mut scans = 0;
    loop {
        let Some(skipped) = bytes.get(at..).and_then(|rest| rest.iter().position(|b| *b == 0xff)) else {
            return Err(TRUNCATED);
        };
        at += skipped;
        while bytes.get(at) == Some(&0xff) {
            at += 1; // fill bytes
        }
        let marker = *bytes.get(at).ok_or(TRUNCATED)?;
        at += 1;
        match marker {
            0xd9 if scans == 0 => return Err("the JPEG has no picture data"),
            0xd9 => return Ok(()),
            // A stuffed zero, restart markers and the other markers without a length: between them lies entropy-coded data.
            0x00 | 0x01 | 0xd0..=0xd8 => {}
            _ => {
                let length = bytes.get(at..at + 2).ok_or(TRUNCATED)?;
                at += usize::from(u16::from_be_bytes([length[0], length[1]])).max(2);
                scans += u32::from(marker == 0xda);
            }
        }
    }
}
