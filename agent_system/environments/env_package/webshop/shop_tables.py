# SPDX-License-Identifier: Apache-2.0
"""What a generated shop is made of: five categories, their kinds of products, attributes and options.

Within a category every attribute has a word that occurs in no other attribute, product name, option value or filler
sentence, so that who reads a page can tell whether it names the attribute.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CATEGORIES", "COLORS", "FILLERS", "LINES", "SYLLABLES", "Category", "Kind"]

Options = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of product.

    name: as requests call it. query: the shop's name of the sub-category. path: below the category's root. price:
    dollars, lowest and highest. uses: what it is for. options: option name and possible values.
    """

    name: str
    query: str
    path: tuple[str, ...]
    price: tuple[int, int]
    uses: tuple[str, ...]
    options: Options


@dataclass(frozen=True, slots=True)
class Category:
    """A category. signatures: attributes that titles show; hidden: attributes that only sub-pages show."""

    name: str
    root: str
    signatures: tuple[str, ...]
    hidden: tuple[str, ...]
    kinds: tuple[Kind, ...]


COLORS = (
    "black", "white", "navy blue", "forest green", "burgundy", "charcoal", "teal", "mustard yellow", "coral", "beige",
    "lilac", "sky blue",
)  # fmt: skip

LINES = ("Classic", "Prime", "Studio", "Everyday", "Nova", "Heritage", "Select", "Origin", "Signature", "Pure")

SYLLABLES = (
    ("Ve", "Kin", "Or", "Lu", "Bra", "Tal", "Mi", "Zen", "Har", "Fo", "Da", "Syl", "Nor", "Qui", "Pel", "Ash", "Gri"),
    ("lo", "ta", "ri", "ve", "mi", "do", "sha", "len", "ko", "ru"),
    ("ra", "nix", "va", "ton", "dell", "mo", "lia", "ster", "by", "kin"),
)

FILLERS = (
    "Ships in a plain carton with a short guide.",
    "Our team answers questions every weekday.",
    "A thoughtful present for family and friends.",
    "Made in small batches and checked by hand.",
    "Keep this page open to compare it with others.",
    "Customers tell us they come back for more.",
    "Please look at the photos before you decide.",
    "The look may differ slightly from the pictures.",
)

_VOLUMES = ("size", ("50 ml", "100 ml", "200 ml", "300 ml", "500 ml"))
_SCENTS = ("scent", ("vanilla", "citrus", "unscented", "jasmine", "sandalwood", "eucalyptus", "fig"))
_PACKS = ("package", ("pack of 1", "pack of 2", "pack of 3", "pack of 6", "pack of 12"))
_COLOR = ("color", COLORS)
_CLOTHES = ("size", ("x-small", "small", "medium", "large", "x-large", "xx-large"))
_SHOES = ("size", ("6", "6.5", "7", "7.5", "8", "8.5", "9", "9.5", "10", "11"))
_WIDTH = ("width", ("narrow", "regular", "wide", "extra wide"))
_SETS = ("set", ("single", "set of 2", "set of 3", "set of 4"))
_WEIGHT = ("size", ("6 ounce", "8 ounce", "12 ounce", "16 ounce", "2 pound"))
_BOX = ("container", ("pouch", "jar", "tin", "gift box", "canister"))

CATEGORIES = (
    Category(
        "beauty",
        "Beauty & Personal Care",
        (
            "argan oil", "shea butter", "aloe vera", "tea tree", "coconut milk", "vitamin c", "green clay",
            "manuka honey", "sea kelp", "lavender extract", "bamboo ash", "rice bran",
        ),
        (
            "paraben free", "cruelty free", "long lasting", "fragrance free", "dermatologist tested", "alcohol free",
            "travel friendly", "non greasy", "sensitive skin", "quick absorbing",
        ),
        (
            Kind("face cream", "face creams", ("Skin Care", "Face"), (8, 90),
                 ("dry mornings", "daily care"), (_VOLUMES, _SCENTS)),
            Kind("shampoo bar", "shampoo bars", ("Hair Care", "Shampoo"), (6, 60),
                 ("curly hair", "busy days"), (_SCENTS, _PACKS)),
            Kind("lip balm", "lip balms", ("Skin Care", "Lips"), (3, 45),
                 ("cold winters", "the pocket"), (_SCENTS, _PACKS)),
            Kind("body lotion", "body lotions", ("Skin Care", "Body"), (7, 70),
                 ("after the bath", "summer"), (_VOLUMES, _SCENTS)),
            Kind("hair mask", "hair masks", ("Hair Care", "Treatments"), (9, 80),
                 ("weekly use", "the weekend"), (_VOLUMES, _PACKS)),
            Kind("hand soap", "hand soaps", ("Bath", "Soaps"), (4, 50),
                 ("the kitchen sink", "guests"), (_VOLUMES, _SCENTS, _PACKS)),
        ),
    ),
    Category(
        "electronics",
        "Electronics",
        (
            "noise cancelling", "aluminum alloy", "braided nylon", "fast charging", "ultra slim", "water resistant",
            "carbon fiber", "gold plated", "hi fi", "low latency", "shock absorbing", "solar powered",
        ),
        (
            "easy installation", "overcharge protection", "voice assistant", "auto shutoff", "tangle proof",
            "lifetime warranty", "wide compatibility", "dust sealed", "dual microphones", "energy saving",
        ),
        (
            Kind("wireless earbuds", "earbud headphones", ("Headphones", "Earbuds"), (15, 240),
                 ("the commute", "running"), (_COLOR,)),
            Kind("usb cable", "usb cables", ("Accessories", "Cables"), (5, 60), ("the desk", "the car"),
                 (_COLOR, ("length", ("3 ft", "6 ft", "10 ft", "15 ft")))),
            Kind("phone case", "phone cases", ("Cell Phones", "Cases"), (7, 80), ("hikers", "work"),
                 (_COLOR, ("fits", ("model a1", "model a2", "model b5", "model b7")))),
            Kind("bluetooth speaker", "portable speakers", ("Audio", "Speakers"), (18, 300),
                 ("the garden", "parties"), (_COLOR,)),
            Kind("power bank", "power banks", ("Accessories", "Batteries"), (14, 150), ("long flights", "festivals"),
                 (_COLOR, ("capacity", ("5000 mah", "10000 mah", "20000 mah", "26800 mah")))),
            Kind("desk keyboard", "computer keyboards", ("Computers", "Keyboards"), (20, 260),
                 ("the office", "gaming"),
                 (_COLOR, ("switch", ("linear", "tactile", "clicky", "silent")))),
        ),
    ),
    Category(
        "garden",
        "Home & Kitchen",
        (
            "solid walnut", "velvet upholstered", "woven rattan", "wrought iron", "tempered glass", "marble top",
            "mid century", "farmhouse style", "hand carved", "reclaimed pine", "brushed brass", "tufted linen",
        ),
        (
            "easy assembly", "heavy duty", "space saving", "scratch proof", "machine washable", "non slip",
            "stain repellent", "weather sealed", "fade resistant", "eco friendly",
        ),
        (
            Kind("table lamp", "table lamps", ("Lighting", "Lamps"), (18, 260),
                 ("the bedside", "reading"), (_COLOR, _SETS)),
            Kind("bar stool", "bar stools", ("Furniture", "Stools"), (40, 420),
                 ("the counter", "small kitchens"), (_COLOR, _SETS)),
            Kind("storage basket", "storage baskets", ("Storage", "Baskets"), (9, 90), ("toys", "the hallway"),
                 (_COLOR, ("size", ("small", "medium", "large", "extra large")))),
            Kind("console table", "console tables", ("Furniture", "Tables"), (60, 600),
                 ("the entryway", "behind the sofa"),
                 (_COLOR, ("width", ("30 inch", "36 inch", "42 inch", "48 inch")))),
            Kind("throw pillow", "throw pillows", ("Bedding", "Pillows"), (8, 80), ("the couch", "guests"),
                 (_COLOR, ("size", ("12x20", "16x16", "18x18", "20x20", "24x24")))),
            Kind("picture frame", "picture frames", ("Decor", "Frames"), (6, 90), ("the gallery wall", "memories"),
                 (_COLOR, ("size", ("4x6", "5x7", "8x10", "11x14")), _SETS)),
        ),
    ),
    Category(
        "fashion",
        "Clothing, Shoes & Jewelry",
        (
            "merino wool", "organic cotton", "faux leather", "stretch denim", "ripstop nylon", "quilted lining",
            "mesh panel", "polka dot", "floral print", "cable knit", "suede trim", "silk blend",
        ),
        (
            "moisture wicking", "wrinkle resistant", "tumble dry", "arch support", "adjustable straps",
            "zippered pockets", "reflective stripes", "tagless collar", "reinforced seams", "odor control",
        ),
        (
            Kind("running shoes", "running shoes", ("Shoes", "Athletic"), (30, 210),
                 ("the track", "long walks"), (_COLOR, _SHOES, _WIDTH)),
            Kind("rain jacket", "rain jackets", ("Clothing", "Jackets"), (25, 260),
                 ("wet autumns", "cycling"), (_COLOR, _CLOTHES)),
            Kind("crew socks", "crew socks", ("Clothing", "Socks"), (5, 45),
                 ("hiking", "every day"), (_COLOR, _CLOTHES, _PACKS)),
            Kind("maxi dress", "maxi dresses", ("Clothing", "Dresses"), (20, 180),
                 ("the beach", "evenings"), (_COLOR, _CLOTHES)),
            Kind("ankle boots", "ankle boots", ("Shoes", "Boots"), (35, 280),
                 ("the city", "muddy paths"), (_COLOR, _SHOES)),
            Kind("travel backpack", "travel backpacks", ("Luggage", "Backpacks"), (25, 240),
                 ("weekend trips", "school"),
                 (_COLOR, ("volume", ("20 liter", "30 liter", "40 liter", "55 liter")))),
        ),
    ),
    Category(
        "grocery",
        "Grocery & Gourmet Food",
        (
            "dark chocolate", "wild blueberry", "roasted almond", "ginger turmeric", "maple pecan", "smoked paprika",
            "cool peppermint", "dried tomato", "chai spiced", "lemon zest", "toasted coconut", "black truffle",
        ),
        (
            "gluten free", "dairy free", "low sodium", "non gmo", "kosher certified", "sugar free", "high protein",
            "shelf stable", "usda organic", "fair trade",
        ),
        (
            Kind("granola bars", "granola bars", ("Snacks", "Bars"), (4, 48),
                 ("lunch boxes", "hikes"), (_WEIGHT, _PACKS)),
            Kind("herbal tea", "herbal teas", ("Beverages", "Tea"), (4, 55),
                 ("quiet evenings", "the morning"), (_BOX, _PACKS)),
            Kind("trail mix", "trail mixes", ("Snacks", "Mixes"), (5, 60),
                 ("road trips", "movie nights"), (_WEIGHT, _BOX)),
            Kind("ground coffee", "ground coffees", ("Beverages", "Coffee"), (6, 75),
                 ("the press", "slow breakfasts"),
                 (_WEIGHT, _BOX, ("strength", ("mild", "balanced", "bold", "intense")))),
            Kind("pasta sauce", "pasta sauces", ("Pantry", "Sauces"), (3, 40),
                 ("weeknights", "large families"), (_WEIGHT, _PACKS)),
            Kind("rice crackers", "rice crackers", ("Snacks", "Crackers"), (3, 42),
                 ("cheese boards", "parties"), (_WEIGHT, _BOX, _PACKS)),
        ),
    ),
)  # fmt: skip
