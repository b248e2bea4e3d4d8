//! TOML with places: a JSON value, and for every dotted path the span of its key and of its value.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::{Map, Number, Value};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::mistake::{Mistake, Origin};

/// Where a value was written.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) origin: Origin,
    pub(crate) key: Range<usize>,
    pub(crate) value: Range<usize>,
}

/// Dotted path, with `[i]` for array items → place.
pub(crate) type Places = BTreeMap<String, Place>;

/// Parses a whole document.
pub(crate) fn parse_document(origin: &Origin) -> Result<(Map<String, Value>, Places), Vec<Mistake>> {
    let (table, errors) = DeTable::parse_recoverable(&origin.text);
    if !errors.is_empty() {
        return Err(errors.iter().map(|error| syntax(origin, error)).collect());
    }
    let mut reader = Reader { origin, shift: 0, places: Places::new(), mistakes: Vec::new() };
    let map = reader.table(table.get_ref(), "");
    if reader.mistakes.is_empty() { Ok((map, reader.places)) } else { Err(reader.mistakes) }
}

/// Parses one value that starts at byte `shift` of `origin`; what is not TOML is taken for a string.
/// `key` is the span of its key and `path` its dotted path.
pub(crate) fn parse_value(
    origin: &Origin,
    shift: usize,
    key: Range<usize>,
    path: &str,
) -> Result<(Value, Places), Vec<Mistake>> {
    let text = &origin.text[shift..];
    let mut reader = Reader { origin, shift, places: Places::new(), mistakes: Vec::new() };
    let value = if let Ok(value) = DeValue::parse(text) {
        reader.note(path, key, value.span());
        reader.value(&value, path)
    } else {
        reader.note(path, key, 0..text.len());
        Value::from(text)
    };
    if reader.mistakes.is_empty() { Ok((value, reader.places)) } else { Err(reader.mistakes) }
}

fn syntax(origin: &Origin, error: &toml::de::Error) -> Mistake {
    let message = error.message().lines().collect::<Vec<_>>().join(", ");
    let mistake = Mistake::new(format!("`{}` is not valid TOML: {message}", origin.name));
    match error.span() {
        Some(span) => mistake.at(origin, span, "here"),
        None => mistake,
    }
}

struct Reader<'a> {
    origin: &'a Origin,
    shift: usize,
    places: Places,
    mistakes: Vec<Mistake>,
}

impl Reader<'_> {
    fn note(&mut self, path: &str, key: Range<usize>, value: Range<usize>) {
        let value = value.start + self.shift..value.end + self.shift;
        self.places.insert(path.to_owned(), Place { origin: self.origin.clone(), key, value });
    }

    fn table(&mut self, table: &DeTable<'_>, path: &str) -> Map<String, Value> {
        let mut map = Map::new();
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            let path = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
            let key_span = key.span().start + self.shift..key.span().end + self.shift;
            // The span of a `[header]` table is its header, which is what a person looks for.
            self.note(&path, key_span, value.span());
            let value = self.value(value, &path);
            map.insert(name.to_owned(), value);
        }
        map
    }

    fn value(&mut self, value: &Spanned<DeValue<'_>>, path: &str) -> Value {
        match value.get_ref() {
            DeValue::String(text) => Value::from(text.as_ref()),
            DeValue::Boolean(flag) => Value::from(*flag),
            DeValue::Datetime(time) => Value::from(time.to_string()),
            DeValue::Integer(digits) => match i64::from_str_radix(digits.as_str(), digits.radix()) {
                Ok(number) => Value::from(number),
                Err(_) => self.refuse(path, value.span(), "does not fit into 64 bits"),
            },
            DeValue::Float(digits) => match digits.as_str().parse().ok().and_then(Number::from_f64) {
                Some(number) => Value::Number(number),
                None => self.refuse(path, value.span(), "is not a finite number"),
            },
            DeValue::Array(items) => items
                .iter()
                .enumerate()
                .map(|(index, item)| {
                    let path = format!("{path}[{index}]");
                    let span = item.span().start + self.shift..item.span().end + self.shift;
                    self.note(&path, span, item.span());
                    self.value(item, &path)
                })
                .collect(),
            DeValue::Table(table) => Value::Object(self.table(table, path)),
        }
    }

    fn refuse(&mut self, path: &str, span: Range<usize>, why: &str) -> Value {
        let span = span.start + self.shift..span.end + self.shift;
        self.mistakes.push(Mistake::new(format!("the value of `{path}` {why}")).at(self.origin, span, "here"));
        Value::Null
    }
}
