//! A colour as recipes write it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A colour, red, green, blue; written `#rrggbb`. White by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct Colour(pub [u8; 3]);

impl Default for Colour {
    fn default() -> Self {
        Self([255; 3])
    }
}

impl TryFrom<String> for Colour {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let digits = text.strip_prefix('#').filter(|d| d.len() == 6 && d.bytes().all(|b| b.is_ascii_hexdigit()));
        match digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()) {
            Some(value) => Ok(Self([(value >> 16) as u8, (value >> 8) as u8, value as u8])),
            None => Err(format!("`{text}` is not a colour; write `#rrggbb`, such as `#ffffff`")),
        }
    }
}

impl From<Colour> for String {
    fn from(Colour([r, g, b]): Colour) -> Self {
        format!("#{r:02x}{g:02x}{b:02x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_six_digits_in_either_case() {
        assert_eq!(Colour::try_from("#0a80Ff".to_owned()), Ok(Colour([10, 128, 255])));
        assert_eq!(String::from(Colour([10, 128, 255])), "#0a80ff");
        assert!(
            ["white", "#fff", "0a80ff", "#0a80fg"].iter().all(|text| Colour::try_from((*text).to_owned()).is_err())
        );
    }
}
